"""The committed stubs are what the .proto files say."""

from __future__ import annotations

from pathlib import Path

from protos import generate, worker_pb2


def test_committed_stubs_equal_freshly_generated_ones(tmp_path: Path) -> None:
    fresh = generate.generate(tmp_path)
    assert "worker_pb2.py" in {stub.name for stub in fresh}
    for stub in fresh:
        committed = generate.PACKAGE / stub.name
        assert committed.read_text() == stub.read_text(), f"{stub.name} is stale: run `python -m protos.generate`"


def test_no_stub_is_left_of_a_proto_file_that_is_gone(tmp_path: Path) -> None:
    fresh = {stub.name for stub in generate.generate(tmp_path)}
    assert {stub.name for stub in generate.PACKAGE.glob("*_pb2*")} == fresh


def test_stubs_import_each_other_through_the_package() -> None:
    text = (generate.PACKAGE / "worker_pb2_grpc.py").read_text()
    assert "from protos import worker_pb2" in text
    assert worker_pb2.DESCRIPTOR.name == "protos/worker.proto"

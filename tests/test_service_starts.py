"""`raycomb serve` that never comes to serve: interrupted, or with a model that cannot be served. Nothing is left."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.service_process import running_service, tiny_checkpoint

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(290)]

START_S = 180.0


def test_a_model_that_no_worker_can_load_ends_the_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny_checkpoint(tmp_path / "model")  # it has no architecture; the real executor is asked for
    with running_service(str(folder), "--device", "cpu", "--front", "python", "--host", "127.0.0.1") as process:
        assert process.wait(START_S) == 2
        assert process.left(within_s=10) == []
        assert process.output[-1].startswith("raycomb: error: ")
        assert "is not supported" in process.output[-1]
        assert not any("Traceback" in line for line in process.output)


@pytest.mark.parametrize("words", ["starting Ray", "loading "])
def test_ctrl_c_before_it_is_ready_ends_the_service_and_leaves_nothing(tmp_path: Path, words: str) -> None:
    folder = tiny_checkpoint(tmp_path)
    arguments = [str(folder), "--device", "cpu", "--host", "127.0.0.1", "--executor", "tests.served_fake:make_executor"]
    with running_service(*arguments) as process:
        process.wait_for_line(words, 60)
        process.signal(signal.SIGINT)
        assert process.wait(90) == 130
        assert process.left(within_s=10) == []
        assert not any("Traceback" in line for line in process.output), "".join(process.output)


@pytest.mark.model
def test_weights_that_are_cut_off_end_the_command_with_one_line(smollm2_path: Path, tmp_path: Path) -> None:
    with smollm2_path.open("rb") as whole:
        (tmp_path / "cut.gguf").write_bytes(whole.read(50_000_000))
    with running_service(str(tmp_path / "cut.gguf"), "--device", "cpu", "--host", "127.0.0.1") as process:
        assert process.wait(60) == 2
        (line,) = process.output  # before anything was started
        assert line.startswith("raycomb: error: cut.gguf is not a whole GGUF file: ")

"""A service of a program runs where the program was made for, whatever the cluster has."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Literal

import pytest

from cluster.config import decide_devices, on_device_of_program, service_config
from planner.errors import InvalidProgram
from worker.config import EngineConfig
from worker.programs.metadata import METADATA_MEMBER, ProgramMetadata

Device = Literal["cpu", "cuda"]


@pytest.mark.parametrize("made_for", ["cpu", "cuda"])
def test_a_program_brings_its_device(tmp_path: Path, made_for: Device) -> None:
    config = service_config({"engine": {"model": str(program_without_code(tmp_path, made_for))}, "num_workers": 2})
    assert decide_devices(config, {}).engine.device == made_for
    assert decide_devices(config, {"GPU": 2.0}).engine.device == made_for


def test_programs_for_cpus_need_no_gpu_beside_models_that_do(tmp_path: Path) -> None:
    program = str(program_without_code(tmp_path, "cpu"))
    engines = {"engine": {"model": "m"}, "others": [{"engine": {"model": program}, "num_workers": 3}]}
    config = decide_devices(service_config(engines), {"GPU": 1.0})
    assert [one.engine.device for one in config.each] == ["cuda", "cpu"]


def test_a_device_that_was_asked_for_stays_so_that_the_worker_refuses_it(tmp_path: Path) -> None:
    engine = EngineConfig(model=str(program_without_code(tmp_path, "cpu")), device="cuda")
    assert on_device_of_program(engine) is engine


def test_a_file_that_is_no_program_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "other.pt2").write_bytes(b"nothing")
    with pytest.raises(InvalidProgram, match="not a program"):
        decide_devices(service_config({"engine": {"model": str(tmp_path / "other.pt2")}}), {})


def program_without_code(folder: Path, device: Device) -> Path:
    metadata = ProgramMetadata(
        format=1, name="tiny", architecture="llama", vocab_size=97, context=256, max_prefill_tokens=16,
        min_prefill_tokens=2, widths=(1,), cells=None, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        windows=(None,), dtype="float32", quantization="none", device=device, platform=(), torch="0", source_sha256="",
        weight_bytes=0, weights={},
    )  # fmt: skip
    path = folder / "tiny.pt2"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"tiny/{METADATA_MEMBER}", metadata.model_dump_json())
    return path

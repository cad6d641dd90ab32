"""A program that was exported in another process answers as the eager model does, however prompts are scheduled.

One program is compiled for all tests of this file, by the command itself; it needs a C++ compiler.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.cli import main
from cluster.language.text import load_text
from planner.errors import InvalidConfiguration, InvalidProgram
from planner.request import Request, SamplingParams
from tests.tiny_models import save_tiny_model
from tests.tiny_text import tiny_tokenizer
from tests.torch_rig import Rig, executor_of, load, request
from worker.config import EngineConfig, Quantization
from worker.program import Program, build_executor
from worker.programs.loading import check_machine, program_info
from worker.programs.machine import torch_version
from worker.programs.metadata import METADATA_MEMBER, ProgramMetadata, read_metadata, root_of
from worker.torch_executor import TorchExecutor

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="exporting compiles C++, and there is no g++"),
    pytest.mark.timeout(600),
]

W, CELLS = 16, 300
SIZES = (1, 2, 3, 15, 16, 17, 18, 33, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    save_tiny_model("qwen3", folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def exported(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(folder, tmp_path_factory.mktemp("programs") / "tiny.pt2")


def export(folder: Path, output: Path, *flags: str) -> Path:
    command = [sys.executable, "-m", "cluster.cli", "export", str(folder), "--output", str(output), "--device", "cpu"]
    command += ["--dtype", "float32", "--max-prefill-tokens", str(W), "--num-threads", "1", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def eager(folder: Path) -> Program:
    program = load(str(folder), max_prefill_tokens=W)
    return replace(program, info=replace(program.info, widths=(1,)))


def program_executor(path: Path, **settings: Any) -> TorchExecutor:
    executor = build_executor(EngineConfig(**{"model": str(path), "max_cells": CELLS, "num_threads": 1} | settings))
    assert isinstance(executor, TorchExecutor)
    return executor


@pytest.fixture(scope="module")
def compiled(exported: Path) -> TorchExecutor:
    return program_executor(exported)


def requests(sizes: Sequence[int] = SIZES, n: int = 1, **sampling: Any) -> list[Request]:
    random = np.random.default_rng(3)
    prompts = {size: random.integers(0, 97, size=size).tolist() for size in SIZES}
    params = SamplingParams(**({"temperature": 0.0} | sampling))
    return [request(prompts[size], 6, params, n=n) for size in sizes]


def test_the_program_gives_the_eager_tokens_alone_and_batched(compiled: TorchExecutor, eager: Program) -> None:
    expected = Rig(executor_of(eager, CELLS)).answer_alone(requests())
    assert Rig(compiled).answer_alone(requests()) == expected
    assert Rig(compiled).answer(requests()) == expected


def test_chunks_preemption_and_forks_change_no_token_of_a_program(
    exported: Path, compiled: TorchExecutor, eager: Program
) -> None:
    sizes = (3, 16, 17, 33)
    expected = Rig(executor_of(eager, CELLS)).answer_alone(requests(sizes))
    assert Rig(compiled, prefill_chunk_tokens=4).answer(requests(sizes)) == expected
    cramped = Rig(program_executor(exported, max_cells=46))
    assert cramped.answer(requests(sizes)) == expected
    assert cramped.planner.metrics.num_preemptions > 0
    assert Rig(compiled).answer(requests(sizes, n=3)) == [answer * 3 for answer in expected]


def test_the_bound_of_a_prefill_changes_no_token(exported: Path, compiled: TorchExecutor) -> None:
    """m = 2 and m = 5: steps of two to four tokens run as one prefill, or as that many decodes."""
    wider = program_executor(exported, min_prefill_tokens=5)
    sizes = (1, 18, 33)
    narrow_rig, wide_rig = Rig(compiled), Rig(wider)
    assert wide_rig.answer(requests(sizes)) == narrow_rig.answer(requests(sizes))
    assert wide_rig.planner.metrics.num_forwards.total() > narrow_rig.planner.metrics.num_forwards.total()


def test_sampled_tokens_and_scores_of_a_prompt_come_from_the_same_logits(
    compiled: TorchExecutor, eager: Program
) -> None:
    asked = requests((16, 33), temperature=0.8, seed=5, logprobs=2)
    assert Rig(compiled).answer(asked) == Rig(executor_of(eager, CELLS)).answer(asked)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_program_of_quantized_layers_gives_the_eager_tokens(tmp_path: Path, quantization: Quantization) -> None:
    save_tiny_model("qwen2", tmp_path, sizes={"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1})
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    export(tmp_path, tmp_path / "tiny.pt2", "--quantization", quantization, "--min-prefill-tokens", "5")
    loaded = load(str(tmp_path), max_prefill_tokens=W, quantization=quantization)
    quantized = replace(loaded, info=replace(loaded.info, widths=(1,)))
    sizes = (1, 3, 15, 16, 33)
    expected = Rig(executor_of(quantized, CELLS, 5)).answer_alone(requests(sizes))
    program = program_executor(tmp_path / "tiny.pt2")
    assert Rig(program).answer_alone(requests(sizes)) == expected
    assert Rig(program).answer(requests(sizes)) == expected
    assert Rig(program, prefill_chunk_tokens=4).answer(requests(sizes)) == expected


def test_methods_share_one_copy_of_the_weights(exported: Path) -> None:
    with zipfile.ZipFile(exported) as archive:
        weights = sum(info.file_size for info in archive.infolist() if "/raycomb/weights/" in info.filename)
        others = sum(info.file_size for info in archive.infolist() if info.filename.endswith(".so"))
        assert all(
            info.compress_type == zipfile.ZIP_STORED for info in archive.infolist() if "weights/" in info.filename
        )
    metadata = read_metadata(exported)
    tables = 2 * metadata.context * metadata.head_dim // 2 * 4
    assert weights == metadata.weight_bytes + tables
    assert others < 20e6


def test_a_program_brings_its_text_side(exported: Path, folder: Path) -> None:
    ours, theirs = load_text(exported), load_text(folder)
    assert ours.encode("abc abc") == theirs.encode("abc abc")
    assert ours.eos_ids == theirs.eos_ids


def test_inspect_says_what_the_program_is(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(exported)]) == 0
    said = capsys.readouterr().out
    assert f"m = 2 to W = {W}" in said
    assert torch_version() in said
    assert main(["inspect", str(exported), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["widths"], told["context"], told["vocab_size"]) == ([1], 256, 97)
    assert len(told["source_sha256"]) == 64


def changed(path: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the program whose metadata says something else."""
    copy = folder / "changed.pt2"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(copy, "w") as new:
        member = f"{root_of(old)}/{METADATA_MEMBER}"
        for info in old.infolist():
            data = old.read(info)
            if info.filename == member:
                data = json.dumps(json.loads(data) | changes).encode()
            new.writestr(info.filename, data)
    return copy


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_prefill_tokens": 1}, r"lie in \[2, max_prefill_tokens = 16\], not 1"),
        ({"min_prefill_tokens": 17}, r"lie in \[2, max_prefill_tokens = 16\], not 17"),
        ({"torch": "2.1.0"}, r"compiled by torch 2\.1\.0"),
        ({"platform": ["x86_64", "avx1024"]}, "avx1024"),
        ({"windows": [None]}, "1 windows for 3 layers"),
        ({"widths": [2, 4]}, "ascend from 1"),
        ({"format": 2}, "format"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_a_program_that_was_made_for_something_else_is_refused(
    exported: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidProgram, match=said):
        check_machine(read_metadata(changed(exported, tmp_path, **changes)))


def test_a_geometry_that_the_weights_do_not_have_is_refused(exported: Path, tmp_path: Path) -> None:
    metadata = read_metadata(exported)
    entry = metadata.weights["final_norm"]
    weights = {name: weight.model_dump() for name, weight in metadata.weights.items()}
    weights["final_norm"] = {"dtype": entry.dtype, "shape": [entry.shape[0] + 1]}
    with pytest.raises(InvalidProgram, match="final_norm has 192 bytes, not 196"):
        program_executor(changed(exported, tmp_path, weights=weights))


def test_a_file_that_is_cut_off_or_is_something_else_is_refused(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.pt2").write_bytes(exported.read_bytes()[:100_000])
    with pytest.raises(InvalidProgram, match="not a whole one"):
        read_metadata(tmp_path / "cut.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("a/b", "c")
    with pytest.raises(InvalidProgram, match="without a program's metadata"):
        read_metadata(tmp_path / "other.pt2")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "bfloat16"}, "dtype bfloat16 was asked for, and the program was made for float32"),
        ({"quantization": "int8"}, "quantization int8"),
        ({"device": "cuda"}, "device cuda was asked for"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8, and a program keeps .* which are float32"),
        ({"load_format": "dummy"}, "dummy"),
        ({"max_prefill_tokens": 17}, r"\[2, 16\], not 17"),
        ({"max_prefill_tokens": 8, "min_prefill_tokens": 8, "max_model_len": 300}, "context of 256"),
        ({"min_prefill_tokens": 17, "max_prefill_tokens": None}, r"\[2, 16\] for this program, not 17"),
    ],
)
def test_settings_that_the_program_cannot_follow_are_refused(exported: Path, settings: Any, said: str) -> None:
    with pytest.raises(InvalidConfiguration, match=said):
        program_info(read_metadata(exported), EngineConfig(model=str(exported), **settings))


def test_settings_may_narrow_a_program(exported: Path) -> None:
    info = program_info(
        read_metadata(exported), EngineConfig(model="x", max_prefill_tokens=8, max_model_len=64, max_cells=7)
    )
    assert (info.max_prefill_tokens, info.context, info.num_cells) == (8, 64, 7)


def test_run_takes_a_program_as_it_takes_a_model(exported: Path, folder: Path, tmp_path: Path) -> None:
    prompts, report = tmp_path / "in.jsonl", tmp_path / "report.json"
    prompts.write_text(
        "".join(json.dumps({"prompt_token_ids": list(range(n)), "max_tokens": 4}) + "\n" for n in (3, 20))
    )
    answers = []
    for model in (exported, folder):
        output = tmp_path / f"{model.name}.jsonl"
        words = ["run", str(model), "--prompts", str(prompts), "--output", str(output), "--report", str(report)]
        words += ["--device", "cpu", "--dtype", "float32", "--max-cells", "300", "--num-threads", "1"]
        assert main([*words, "--max-prefill-tokens", str(W)]) == 0
        answers.append([json.loads(line)["token_ids"] for line in output.read_text().splitlines()])
        figures = json.loads(report.read_text())
        assert figures["program"]["max_prefill_tokens"] == W
        assert figures["pool"]["cells"] == 300
    assert answers[0] == answers[1]


def test_what_cannot_be_exported_is_refused_before_anything_is_compiled(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, said in (
        ([str(exported), "--output", str(tmp_path / "again.pt2")], "is a program already"),
        (["x", "--output", str(tmp_path / "name.txt")], ".pt2"),
        (["x", "--output", str(tmp_path / "no" / "folder.pt2")], "there is no folder"),
    ):
        assert main(["export", *arguments]) == 2
        assert said in capsys.readouterr().err


def test_metadata_of_a_program_is_complete(exported: Path) -> None:
    metadata = read_metadata(exported)
    assert isinstance(metadata, ProgramMetadata)
    assert (metadata.device, metadata.dtype, metadata.quantization) == ("cpu", "float32", "none")
    assert (metadata.num_layers, metadata.num_heads, metadata.num_kv_heads, metadata.head_dim) == (3, 4, 2, 16)
    assert metadata.cells is None

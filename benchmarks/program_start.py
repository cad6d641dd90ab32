"""How soon a program answers, against loading its model and against compiling at the start; and that it answers alike.

Every figure is of a process of its own, from before torch is imported to the first token of a prompt. Then the program
is compared with the eager model, token by token, under each schedule: alone, batched, in chunks, preempted, forked.
Needs the test tree (for its rig) and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import record
from cluster.checkpoints import resolve

PROMPT = list(range(100, 132))
SIZES = (1, 2, 5, 16, 40, 130)
NUM_TOKENS = 6
LONGER, FEW_CELLS = 24, 90
"""Answers of so many tokens, to all prompts but the longest, begin together in so many cells and outgrow them."""


def first_token(start: str, model: str) -> None:
    """Print seconds and the token; `start` is how the engine comes to be."""
    began = time.perf_counter()
    from planner.slices import Method, Slice
    from planner.step import Step
    from tests.torch_rig import chunk, token_of
    from worker.config import EngineConfig
    from worker.program import build_executor

    config = EngineConfig(model=model, device="cpu", max_model_len=2048, max_cells=4096)
    executor = _compiling(config) if start == "compile" else build_executor(config)
    prompt = chunk(PROMPT, range(len(PROMPT)))
    executor.launch(Step(1, (prompt,), (Slice(0, len(PROMPT), Method.PREFILL),)))
    token = token_of(executor.collect().outcomes[0])
    prefilled = time.perf_counter() - began
    following = chunk([token], range(len(PROMPT) + 1), start=len(PROMPT))
    executor.launch(Step(2, (following,), (Slice(0, 1, Method.DECODE),)))
    tokens = [token, token_of(executor.collect().outcomes[0])]
    print(json.dumps({"first_token_s": prefilled, "second_token_s": time.perf_counter() - began, "tokens": tokens}))


def _compiling(config: Any) -> Any:
    """An executor whose two methods torch.compile compiles when they first run."""
    import torch

    from worker.kv_pool import KvPool
    from worker.program import load_program
    from worker.programs.forwards import ProgramForwards
    from worker.programs.metadata import ProgramMetadata
    from worker.programs.traced import TracedDecoder
    from worker.torch_executor import TorchExecutor

    program = load_program(config, keep_blocks=False)
    info, model = program.info, program.decoder.config
    pool = KvPool(info.num_layers, info.num_cells, info.num_kv_heads, info.head_dim, torch.float32, torch.device("cpu"))
    module = TracedDecoder(program.decoder).eval()
    metadata = ProgramMetadata(
        format=1, name=info.name, architecture=info.architecture, vocab_size=info.vocab_size, context=info.context,
        max_prefill_tokens=info.max_prefill_tokens, min_prefill_tokens=2, widths=(1,), cells=None,
        num_layers=info.num_layers, num_heads=model.num_heads, num_kv_heads=info.num_kv_heads, head_dim=info.head_dim,
        windows=model.windows, dtype="float32", quantization="none", device="cpu", platform=(), torch="",
        source_sha256="", weight_bytes=0, weights={},
    )  # fmt: skip
    decode, prefill = torch.compile(module, dynamic=False), torch.compile(module, dynamic=True)
    return TorchExecutor(info, ProgramForwards(metadata, pool, {1: decode}, prefill))


def compare(program: str, model: str) -> dict[str, bool]:
    """Whether the program gives the eager model's tokens, by schedule."""
    from planner.request import Request, SamplingParams
    from tests.torch_rig import Rig, request
    from worker.config import EngineConfig
    from worker.program import build_executor

    def engine(path: str, cells: int, **changes: Any) -> Any:
        settings: dict[str, Any] = {"model": path, "device": "cpu", "max_model_len": 2048, "max_cells": cells}
        return build_executor(EngineConfig(**(settings | changes)))

    random = np.random.default_rng(5)
    prompts = [random.integers(0, 49152, size=size).tolist() for size in SIZES]

    def requests(n: int = 1) -> Sequence[Request]:
        return [request(prompt, NUM_TOKENS, SamplingParams(temperature=0.0), n=n) for prompt in prompts]

    def longer() -> Sequence[Request]:
        return [request(prompt, LONGER, SamplingParams(temperature=0.0)) for prompt in prompts[:-1]]

    eager = Rig(engine(model, 2048))
    expected, expected_of_longer = eager.answer_alone(requests()), eager.answer_alone(longer())
    roomy = engine(program, 2048)
    cramped = Rig(engine(program, FEW_CELLS))
    same = {
        "alone": Rig(roomy).answer_alone(requests()) == expected,
        "batched": Rig(roomy).answer(requests()) == expected,
        "chunks of 8": Rig(roomy, prefill_chunk_tokens=8).answer(requests()) == expected,
        "preempted": cramped.answer(longer()) == expected_of_longer and cramped.planner.metrics.num_preemptions > 0,
        "forked": Rig(roomy).answer(requests(3)) == [answer * 3 for answer in expected],
        "m = 5": Rig(engine(program, 2048, min_prefill_tokens=5)).answer(requests()) == expected,
    }
    print(json.dumps(same))
    return same


def in_a_process(*arguments: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.program_start", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--program", type=Path, help="exported before; made and thrown away if not given")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--first-token", choices=("model", "program", "compile"), help=argparse.SUPPRESS)
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    model = str(resolve(args.model))
    if args.first_token is not None:
        return first_token(args.first_token, str(args.program) if args.first_token == "program" else model)
    if args.compare:
        compare(str(args.program), model)
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = args.program or Path(folder) / "program.pt2"
        export_s = None
        if args.program is None:
            began = time.perf_counter()
            export = [sys.executable, "-m", "cluster.cli", "export", args.model, "--output", str(program)]
            subprocess.run([*export, "--device", "cpu", "--max-model-len", "2048"], check=True)
            export_s = time.perf_counter() - began
        given = ["--program", str(program), "--model", args.model]
        figures: dict[str, Any] = {"export_s": export_s, "program_bytes": program.stat().st_size}
        figures["same_tokens"] = in_a_process("--compare", *given)
        for start, repeats in (("model", args.repeats), ("program", args.repeats), ("compile", 1)):
            figures[start] = [in_a_process("--first-token", start, *given) for _ in range(repeats)]
    config = {"model": args.model, "prompt_tokens": len(PROMPT), "sizes": SIZES, "repeats": args.repeats}
    record("program-start", config, figures, keep=args.keep)
    return None


if __name__ == "__main__":
    main()

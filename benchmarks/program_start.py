"""How soon a program answers, against loading its model and against compiling at the start; and how fast it goes on.

Every figure is of a process of its own, from before torch is imported to the first token of a prompt, then decodes of
one and of eight sequences. On a CPU the program is also compared with the eager model, token by token, under each
schedule: alone, batched, in chunks, preempted, forked. `--device cuda --shape qwen3-0.6b` needs no model: its weights
are random, and `--layers` bounds how long compiling takes; there the first start of each kind finds no cache of a
compiler, and further ones what the first left. What compiles at the start (without quantization only) captures nothing
and tries nothing before it serves. Needs the test tree (for its rig) and a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.program_schedules import SIZES, compare
from benchmarks.record import record

PROMPT = list(range(100, 132))
ROWS = (1, 8)
ON_A_GPU = "program without graphs"
STARTS = ("model", "program", ON_A_GPU, "compile")
NUM_STEPS = 32


@dataclass(frozen=True, slots=True)
class Subject:
    """What is started: `settings` are those of an engine, for the model and for the program alike."""

    model: str
    program: str
    settings: dict[str, Any]
    of_model: dict[str, Any]


def first_token(start: str, subject: Subject) -> None:
    """Print seconds, tokens, and milliseconds a step later; `start` is how the engine comes to be."""
    began = time.perf_counter()
    from tests.torch_rig import token_of
    from worker.config import EngineConfig
    from worker.program import build_executor

    model = EngineConfig(model=subject.model, **subject.settings, **subject.of_model)
    graphs = start != ON_A_GPU
    program = EngineConfig(model=subject.program, **subject.settings, cuda_graph=graphs)
    executor = _compiling(model) if start == "compile" else build_executor(model if start == "model" else program)
    started = time.perf_counter() - began
    steps = Steps(executor)
    token = token_of(steps.prefill())
    prefilled = time.perf_counter() - began
    tokens = [token, token_of(steps.decode([token])[0])]
    seconds = {"started_s": started, "first_token_s": prefilled, "second_token_s": time.perf_counter() - began}
    later = {f"ms_a_step_of_{rows}": 1e3 * steps.seconds_of(rows) for rows in ROWS}
    print(json.dumps(seconds | later | {"tokens": tokens}))


class Steps:
    """One executor's steps over sequences of the same prompt, each in cells of its own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._position = len(PROMPT)

    def prefill(self) -> Any:
        from planner.slices import Method
        from tests.torch_rig import chunk

        return self._run([chunk(PROMPT, self._cells(0)[: len(PROMPT)])], Method.PREFILL)[0]

    def join(self, row: int) -> None:
        """Another sequence, as long as the first one is by now."""
        from planner.slices import Method
        from tests.torch_rig import chunk

        tokens = [100 + row] * self._position
        self._run([chunk(tokens, self._cells(row)[: len(tokens)], sequence_id=row + 1)], Method.PREFILL)

    def decode(self, tokens: Sequence[int]) -> list[Any]:
        """The next position of as many sequences as there are tokens."""
        from planner.slices import Method
        from tests.torch_rig import chunk

        start = self._position
        self._position += 1
        chunks = [
            chunk([token], self._cells(row)[: start + 1], start=start, sequence_id=row + 1)
            for row, token in enumerate(tokens)
        ]
        return self._run(chunks, Method.DECODE)

    def seconds_of(self, rows: int) -> float:
        """A step of so many sequences, after a few that are not counted."""
        from tests.torch_rig import token_of

        for row in range(1, rows):
            self.join(row)
        for _ in range(4):
            self.decode([7] * rows)
        began = time.perf_counter()
        for _ in range(NUM_STEPS):
            for outcome in self.decode([7] * rows):
                token_of(outcome)
        return (time.perf_counter() - began) / NUM_STEPS

    def _run(self, chunks: Sequence[Any], method: Any) -> list[Any]:
        from planner.slices import Slice
        from planner.step import Step

        total = sum(chunk.length for chunk in chunks)
        widest = self._executor.info.widths[-1]
        at_once = total if method.value == "prefill" else widest
        slices = tuple(Slice(at, min(at_once, total - at), method) for at in range(0, total, at_once))
        self._executor.launch(Step(1, tuple(chunks), slices))
        return list(self._executor.collect().outcomes)

    def _cells(self, row: int) -> range:
        return range(256 * row, 256 * (row + 1))


def _compiling(config: Any) -> Any:
    """An executor whose two methods torch.compile compiles when they first run."""
    from dataclasses import replace

    import torch

    from worker.program import load_program, make_pool
    from worker.programs.forwards import Methods, ProgramForwards, decode_ladder
    from worker.programs.metadata import ProgramMetadata
    from worker.programs.traced import TracedDecoder
    from worker.torch_executor import TorchExecutor

    program = load_program(config, keep_blocks=False)
    info, model = program.info, program.decoder.config
    module = TracedDecoder(program.decoder).eval()
    metadata = ProgramMetadata(
        format=1, name=info.name, architecture=info.architecture, vocab_size=info.vocab_size, context=info.context,
        max_prefill_tokens=info.max_prefill_tokens, min_prefill_tokens=info.min_prefill_tokens, widths=(1,), cells=None,
        num_layers=info.num_layers, num_heads=model.num_heads, num_kv_heads=info.num_kv_heads, head_dim=info.head_dim,
        windows=model.windows, dtype=config.dtype, quantization=config.quantization, device=config.device, platform=(),
        torch="", source_sha256="", weight_bytes=0, weights={},
    )  # fmt: skip
    methods = Methods({1: torch.compile(module, dynamic=False)}, torch.compile(module, dynamic=True))
    # As the program itself runs there: on a CPU a decode has one row.
    ladder = decode_ladder(metadata, methods, ROWS if config.device == "cuda" else (1,))
    info = replace(info, widths=tuple(ladder))
    return TorchExecutor(info, ProgramForwards(metadata, make_pool(config, info), ladder, methods.prefill))


def export(subject: Subject) -> None:
    from worker.config import EngineConfig
    from worker.programs.export import export_model

    config = EngineConfig(model=subject.model, **subject.settings, **subject.of_model)
    export_model(config, Path(subject.program), (1,), {}, lambda line: print(line, file=sys.stderr))


def in_a_process(task: str, subject: Subject, environment: Mapping[str, str]) -> Any:
    """The last line that a task prints; its log goes where ours does."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.program_start",
        "--task",
        task,
        "--subject",
        json.dumps(asdict(subject)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, **environment})
    print(task, done.stdout, file=sys.stderr, flush=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def measured(subject: Subject, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    def run(task: str) -> Any:
        """Tasks of one name share what Triton and torch's compiler made, and nothing else does."""
        caches = {name: str(folder / task / name) for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        return in_a_process(task, subject, caches if args.device == "cuda" else {})

    figures: dict[str, Any] = {}
    if args.program is None:
        began = time.perf_counter()
        run("export")
        figures["export_s"] = time.perf_counter() - began
    figures["program_bytes"] = Path(subject.program).stat().st_size
    if args.device == "cpu" and args.shape is None:
        figures["same_tokens"] = run("compare")
    for start in args.starts:
        if start == "compile" and args.quantization != "none":
            continue  # torch.compile does not see through quantized matrices
        figures[start] = [run(start) for _ in range(1 if start == "compile" and args.device == "cpu" else args.repeats)]
    return figures


def subject_of(args: argparse.Namespace, folder: Path) -> Subject:
    settings: dict[str, Any] = {"device": args.device, "max_model_len": 2048, "max_cells": 4096}
    of_model: dict[str, Any] = {"quantization": args.quantization, "dtype": "float32"}
    if args.quantization in ("int8", "int4"):
        of_model["min_prefill_tokens"] = 5
    if args.device == "cuda":
        settings |= {"max_num_seqs": ROWS[-1], "max_prefill_tokens": 2048, "swap_space": 0.0}
        of_model["dtype"] = "bfloat16"
    if args.shape is not None:
        from benchmarks.random_model import MODELS

        of_model["load_format"] = "dummy"
        layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
        model = folder / args.shape
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODELS[args.shape] | layers))
    else:
        from cluster.checkpoints import resolve

        model = resolve(args.model)
    return Subject(str(model), str(args.program or folder / "program.pt2"), settings, of_model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", help="random weights of this shape instead of a model, as qwen3-0.6b")
    parser.add_argument("--layers", type=int, help="of the shape, so many layers only")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quantization", choices=("none", "int8", "int4", "fp8"), default="none")
    parser.add_argument("--program", type=Path, help="exported before; made and thrown away if not given")
    parser.add_argument("--keep", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--starts", nargs="+", choices=STARTS, help="in this order; all that the device has")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--subject", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task is not None:
        logging.basicConfig(level=logging.INFO)  # programs say how long each part of their start took
        return run_task(args.task, Subject(**json.loads(args.subject)))
    args.starts = args.starts or [start for start in STARTS if args.device == "cuda" or start != ON_A_GPU]
    with tempfile.TemporaryDirectory() as folder:
        subject = subject_of(args, Path(folder))
        figures = measured(subject, args, Path(folder))
    config = {
        "model": args.shape or args.model, "layers": args.layers, "prompt_tokens": len(PROMPT), "sizes": SIZES,
        "repeats": args.repeats, "settings": subject.settings | subject.of_model,
    }  # fmt: skip
    kind = "" if args.device == "cpu" else f"-{args.device}-{args.quantization}"
    record(f"program-start{kind}", config, figures, keep=args.keep)
    return None


def run_task(task: str, subject: Subject) -> None:
    match task:
        case "export":
            export(subject)
        case "compare":
            compare(subject.program, subject.model)
        case _:
            first_token(task, subject)


if __name__ == "__main__":
    main()

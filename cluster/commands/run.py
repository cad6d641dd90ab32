"""`raycomb run`: an offline batch, from one file of prompts to one file of answers, without Ray and without HTTP."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from tqdm import tqdm

from cluster.adapters.settings import check_lora_settings, named_modules
from cluster.checkpoints import resolve
from cluster.commands.argument_types import file_to_write
from cluster.commands.engine_flags import add_engine_flags, engine_config, given_engine_settings
from cluster.commands.terminal import say
from cluster.language.text import load_text
from cluster.model_settings import BUILD_EXECUTOR
from cluster.offline.batch import Batch, Totals
from cluster.offline.engine import Interrupted, OfflineEngine, open_offline
from cluster.offline.files import OrderedWriter, read_lines
from planner.errors import InvalidConfiguration
from worker.config import EngineConfig

EXIT_SOME_FAILED = 1
EXIT_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a program, a hub id or smollm2-135m")
    parser.add_argument(
        "--prompts", type=Path, required=True, help="JSON lines: prompt, prompt_token_ids or messages, and more"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, in the order of the prompts")
    parser.add_argument(
        "--report",
        type=file_to_write,
        metavar="FILE",
        help="also write counts, rates and the configuration to this file",
    )
    parser.add_argument("--tokenizer", metavar="MODEL", help="where the tokenizer is, if not with the model")
    parser.add_argument(
        "--executor", default=BUILD_EXECUTOR, metavar="MODULE:NAME", help="import path of what makes the executor"
    )
    parser.add_argument("--seed", type=int, default=0, help="of lines without a seed, and of dummy weights")
    parser.add_argument(
        "--lora-modules",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=FOLDER",
        help="adapters that a line's `model` may name; needs --enable-lora",
    )
    add_engine_flags(parser, without=frozenset({"seed"}))


def execute(args: argparse.Namespace) -> int:
    """Run the batch. Exit code 0, or 1 when some lines got an error, or 130 when it was interrupted."""
    num_lines = _check_files(args.prompts, args.output)
    model = resolve(args.model, report=say)
    config = engine_config(str(model), given_engine_settings(args) | {"seed": args.seed})
    modules = named_modules(args.lora_modules)
    check_lora_settings(config, modules, None, (), has_admin=False)
    text = load_text(model if args.tokenizer is None else resolve(args.tokenizer, report=say))
    interrupted = False
    began = time.perf_counter()
    with (
        open_offline(config, args.executor) as engine,
        args.output.open("w", encoding="utf-8") as file,
        tqdm(total=num_lines, unit="line", file=sys.stderr, disable=None) as bar,
        _interrupts(engine),
    ):
        writer = OrderedWriter(file)
        loading = [engine.engine.load_adapter(name, Path(folder)) for name, folder in modules.items()]
        adapters = [each.result() for each in loading]
        batch = Batch(engine, text, writer, max_num_seqs=config.max_num_seqs, on_line=bar.update, adapters=adapters)
        start = time.perf_counter()
        load_s = start - began
        try:
            batch.run(read_lines(args.prompts, seed=args.seed), most_in_flight(config))
        except Interrupted:
            interrupted = True
        seconds = time.perf_counter() - start
    if args.report is not None:
        figures = report(engine, config, args.model, batch.totals, seconds, load_s)
        args.report.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    say(_summary(batch.totals, seconds, interrupted=interrupted))
    if batch.totals.first_failure is not None:
        say(f"the first that failed is {batch.totals.first_failure}")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_SOME_FAILED if batch.totals.failed else 0


def most_in_flight(config: EngineConfig) -> int:
    """Lines submitted at a time: enough that a place that becomes free is filled at once, and no queue overflows."""
    return max(1, min(2 * config.max_num_seqs, config.max_waiting))


def report(
    engine: OfflineEngine, config: EngineConfig, model: str, totals: Totals, seconds: float, load_s: float
) -> dict[str, Any]:
    """What the batch took, ready for JSON. `model` is the name that the person gave; `seconds` are those of the
    batch, `load_s` those until the engine was ready for it."""
    stats, metrics, info = engine.engine.stats, engine.engine.metrics, engine.info
    return {
        "lines": {"completed": totals.completed, "failed": totals.failed},
        "generations": {reason.value: count for reason, count in metrics.finished.items()},
        "tokens": {
            "prompt": totals.prompt_tokens,
            "cached_prompt": totals.cached_prompt_tokens,
            "generated": totals.generated_tokens,
        },
        "load_s": load_s,
        "seconds": seconds,
        "generated_tokens_per_s": totals.generated_tokens / seconds,
        "steps": {kind: asdict(getattr(stats, kind)) for kind in ("decode", "prefill", "mixed")},
        "forwards": {method.value: count for method, count in metrics.num_forwards.items()},
        "forward_tokens": {method.value: count for method, count in metrics.num_tokens.items()},
        "decodes_of_width": {str(width): count for width, count in sorted(metrics.num_decodes.items())},
        "padded_rows": metrics.num_padded_rows,
        "preemptions": metrics.num_preemptions,
        "prefix": {"queried_tokens": metrics.num_prefix_queries, "hit_tokens": metrics.num_prefix_hits},
        "peak_owned_cells": engine.peak_owned_cells,
        "pool": {
            "cells": info.num_cells,
            "bytes": (info.num_cells + 1) * info.bytes_per_cell,
            "peak_owned_bytes": engine.peak_owned_cells * info.bytes_per_cell,
        },
        "program": asdict(info),
        "config": config.model_dump() | {"model": model},
    }


def _check_files(prompts: Path, output: Path) -> int:
    """Number of lines to answer. Raises `InvalidConfiguration` before anything is loaded or overwritten."""
    if not prompts.is_file():
        raise InvalidConfiguration(f"there is no prompts file {prompts}", param="prompts")
    if output.exists() and os.path.samefile(prompts, output):
        raise InvalidConfiguration("prompts and output are the same file", param="output")
    if output.is_dir():
        raise InvalidConfiguration(f"the output {output} is a folder", param="output")
    if not output.parent.is_dir():
        raise InvalidConfiguration(f"there is no folder {output.parent} for the output", param="output")
    with prompts.open("rb") as file:
        return sum(1 for line in file if line.strip())


@contextmanager
def _interrupts(engine: OfflineEngine) -> Iterator[None]:
    """Within the block the first Ctrl-C ends the run in order; a second one has its usual effect."""

    def handle(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        engine.interrupt()

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _summary(totals: Totals, seconds: float, *, interrupted: bool) -> str:
    rate = totals.generated_tokens / seconds
    state = "interrupted: " if interrupted else ""
    return (
        f"{state}{totals.completed} lines answered, {totals.failed} failed, "
        f"{totals.generated_tokens} tokens in {seconds:.1f} s ({rate:.1f} tokens/s)"
    )

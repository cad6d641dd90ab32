"""`raycomb export`: makes a program of a model, once, so that workers start without compiling. No Ray, no HTTP."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path

from cluster.checkpoints import resolve
from cluster.commands.engine_flags import ADAPTERS, add_engine_flags, engine_config, given_engine_settings
from cluster.commands.terminal import say
from cluster.language.text import TEXT_FILES, load_text
from planner.errors import InvalidConfiguration
from worker.gguf_layout import read_gguf_header
from worker.programs.metadata import SUFFIX

# Settings of an engine that say nothing of a program.
_OF_ENGINES = frozenset(
    {
        "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "prefill_chunk_tokens", "max_waiting",
        "max_waiting_tokens", "tenant_weights", "prefix_caching", "kv_initial_cells", "kv_cache_dtype",
        "swap_space", "cuda_graph", "enable_lora", "max_loras", "max_lora_rank",
    }
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a hub id or smollm2-135m")
    parser.add_argument("--output", type=Path, required=True, help=f"the program's file, {SUFFIX}")
    parser.add_argument(
        "--decode-widths",
        type=_widths,
        default=(1,),
        metavar="N,N,...",
        help="sequences that a decode is compiled for, ascending from 1; each takes its time to compile, and on a GPU "
        "other numbers of them run by the prefill (default: 1)",
    )
    add_engine_flags(parser, without=ADAPTERS | _OF_ENGINES)


def execute(args: argparse.Namespace) -> int:
    """Export; exit code 0. Raises `SetupError` where it cannot be done, before anything is compiled if possible."""
    if args.output.suffix != SUFFIX:
        raise InvalidConfiguration(f"a program's name ends with {SUFFIX}, not as {args.output} does", param="output")
    if not args.output.parent.is_dir():
        raise InvalidConfiguration(f"there is no folder {args.output.parent} for the program", param="output")
    model = resolve(args.model, report=say)
    if model.suffix == SUFFIX:
        raise InvalidConfiguration(f"{args.model} is a program already", param="model")
    load_text(model)  # what a gateway would refuse is refused here
    from worker.programs.export import export_model  # imports torch, which other commands need not

    start = time.perf_counter()
    config = engine_config(str(model), given_engine_settings(args))
    export_model(config, args.output, args.decode_widths, text_side(model), say)
    size = args.output.stat().st_size
    say(f"exported {args.output}: {size / 1e6:.1f} MB in {time.perf_counter() - start:.1f} s")
    return 0


def text_side(model: Path) -> Mapping[str, bytes]:
    """The small files that `cluster.language.text.load_text` reads, by name."""
    if model.is_file():
        return {model.name: read_gguf_header(model)}
    return {name: (model / name).read_bytes() for name in TEXT_FILES if (model / name).is_file()}


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(","))
    except ValueError:
        widths = ()
    if not widths or widths[0] != 1 or list(widths) != sorted(set(widths)):
        raise argparse.ArgumentTypeError(f"decode widths ascend from 1, as in 1,2,4, not {text}")
    return widths

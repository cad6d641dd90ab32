"""`raycomb bench`: `offline` measures an engine in this process, `online` any OpenAI-compatible server."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cluster.bench import online as bench_online
from cluster.bench.offline import DecodePoint, OfflineBench, ThroughputPoint
from cluster.bench.workload import Workload
from cluster.checkpoints import resolve
from cluster.commands.argument_types import file_to_write, one_of, positive, positives, refuse_unread
from cluster.commands.engine_flags import ADAPTERS, add_engine_flags, engine_config, given_engine_settings
from cluster.offline.engine import OfflineEngine, open_offline
from planner.errors import InvalidConfiguration
from worker.config import EngineConfig
from worker.executor import ProgramInfo

BATCH_SIZES = (1, 8, 32)
MIXED_PROMPTS = 256
# Settings that the load itself decides, so that no flag of the engine's sets them.
OWN_SETTINGS = frozenset({"seed", "prefix_caching", "max_waiting"})
# Flags that only some loads read; giving one to another load is refused.
READERS = {
    "batch_sizes": {Workload.DECODE},
    "input_len": {Workload.DECODE, Workload.PREFILL},
    "output_len": {Workload.DECODE},
    "num_prompts": {Workload.MIXED, Workload.PREFILL},
    "length_range": {Workload.MIXED},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="bench", required=True, metavar="offline|online")
    offline = commands.add_parser("offline", help="an engine in this process, without Ray and without HTTP")
    _add_offline_arguments(offline)
    offline.set_defaults(execute_bench=execute_offline)
    online = commands.add_parser("online", help="any OpenAI-compatible server")
    bench_online.add_arguments(online)
    online.set_defaults(execute_bench=bench_online.execute)


def execute(args: argparse.Namespace) -> int:
    """Exit code of the benchmark that was chosen."""
    chosen: Callable[[argparse.Namespace], int] = args.execute_bench
    return chosen(args)


def execute_offline(args: argparse.Namespace) -> int:
    """Measure; print a table and, as the last line, JSON."""
    config = offline_config(args)
    with open_offline(config) as engine:
        figures = measure(engine, args, config)
        figures["floor"] = _floor(engine.info, figures["points"]) if args.workload is Workload.DECODE else None
    print(_table(figures))
    if args.result is not None:
        args.result.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))
    return 0


def offline_config(args: argparse.Namespace) -> EngineConfig:
    """The engine that the flags ask for; unless told otherwise all sequences of the load run at once.

    Raises `InvalidConfiguration` for a flag that the load would not read, and a load that the engine would not run so.
    """
    refuse_unread(args, READERS)
    settings = given_engine_settings(args)
    settings["seed"] = args.seed
    settings["prefix_caching"] = False
    if args.workload is Workload.DECODE:
        settings.setdefault("max_num_seqs", max(args.batch_sizes or BATCH_SIZES))
    if args.workload is Workload.MIXED:
        settings.setdefault("max_num_seqs", args.num_prompts or MIXED_PROMPTS)
    config = engine_config(str(resolve(args.model, report=print)), settings)
    if args.workload is Workload.DECODE and (most := max(args.batch_sizes or BATCH_SIZES)) > config.max_num_seqs:
        raise InvalidConfiguration(
            f"--batch-sizes has {most}, and --max-num-seqs {config.max_num_seqs} lets no more run at once",
            param="batch_sizes",
        )
    return config


def measure(engine: OfflineEngine, args: argparse.Namespace, config: EngineConfig) -> dict[str, Any]:
    """Run the load that `args` describe on a started engine; figures ready for JSON."""
    bench = OfflineBench(engine, max_in_flight=config.max_waiting, repeats=args.repeats, seed=args.seed)
    bench.warm_up()
    points: list[DecodePoint] | list[ThroughputPoint]
    match args.workload:
        case Workload.DECODE:
            input_len, output_len = args.input_len or 128, args.output_len or 256
            sizes = args.batch_sizes or BATCH_SIZES
            points = [bench.decode(batch, input_len=input_len, output_len=output_len) for batch in sizes]
        case Workload.MIXED:
            points = [bench.mixed(args.num_prompts or MIXED_PROMPTS, tuple(args.length_range or (100, 1024)))]
        case _:
            points = [bench.prefill(args.num_prompts or 64, input_len=args.input_len or 2048)]
    return {
        "benchmark": "offline",
        "workload": args.workload.value,
        "points": [asdict(point) for point in points],
        "program": asdict(engine.info),
        "config": config.model_dump() | {"model": args.model},
        "repeats": args.repeats,
    }


def _floor(info: ProgramInfo, points: list[dict[str, Any]]) -> dict[str, Any]:
    """What memory allows at each batch size: every weight and every sequence's K and V are read once a step."""
    from worker.roofline import decode_floor_s, measure_bandwidth  # loads torch, as the program did

    bandwidth = measure_bandwidth(info.device)
    for point in points:
        floor_s = decode_floor_s(
            batch=point["batch"],
            context=point["context"],
            weight_bytes=info.weight_bytes,
            bytes_per_cell=info.bytes_per_cell,
            bandwidth=bandwidth.best,
        )
        point |= {"floor_ms": floor_s * 1e3, "of_floor": floor_s * 1e3 / point["step_ms"]}
    return {"weight_bytes": info.weight_bytes, **asdict(bandwidth)}


def _table(figures: dict[str, Any]) -> str:
    """Points as aligned columns under their names."""
    points = figures["points"]
    cells = [list(points[0])] + [[_shown(value) for value in point.values()] for point in points]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _shown(value: float | int) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def _add_offline_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a folder, a .gguf file, a program, a hub id or smollm2-135m")
    parser.add_argument("--workload", **one_of(Workload), default=Workload.DECODE, help="what is measured")
    parser.add_argument(
        "--batch-sizes", type=positives, metavar="N,N,...", help="decode: sequences at once (default: 1,8,32)"
    )
    parser.add_argument(
        "--input-len", type=positive, metavar="N", help="tokens of a prompt (default: decode 128, prefill 2048)"
    )
    parser.add_argument(
        "--output-len", type=positive, metavar="N", help="decode: tokens after the first (default: 256)"
    )
    parser.add_argument(
        "--num-prompts", type=positive, metavar="N", help="prompts in all (default: mixed 256, prefill 64)"
    )
    parser.add_argument(
        "--length-range",
        type=positive,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="mixed: tokens of prompts and of answers (default: 100 1024)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the load and of dummy weights")
    parser.add_argument(
        "--repeats", type=positive, default=2, metavar="N", help="runs of each point; the fastest counts"
    )
    parser.add_argument("--result", type=file_to_write, metavar="FILE", help="also write the figures to this file")
    add_engine_flags(parser, without=ADAPTERS | OWN_SETTINGS)

"""How long a mixed load's decode steps take on the device, from a few of them: no engine, no prefill, no host.

The load is `raycomb bench offline --workload mixed`: prompts and answers of random lengths, all decoding at once, so
rows end one after another while the others grow. Steps at some moments are timed with just those rows and lengths, in
shuffled cells, and summed up by the trapezoid rule. The floor is the bytes over a measured read rate.

    python -m benchmarks.decode_mixed --shape qwen3-0.6b
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.decode_step import READ_BYTES_PER_S, SHAPES, STEPS, Bench, warm_clocks
from benchmarks.record import record
from cluster.bench import workload
from worker.cell_rows import SCALED
from worker.config import EngineConfig
from worker.cuda.decode_plan import plan_decode

MOMENTS = (0, 64, 128, 256, 384, 512, 640, 768, 832, 896, 960, 1008)
LENGTHS = (100, 1024)


@dataclass(frozen=True, slots=True)
class Moment:
    """After so many steps: the lengths of the rows that still run, and the width that holds them."""

    step: int
    contexts: tuple[int, ...]
    width: int


def moments(steps: Sequence[int] = MOMENTS) -> list[Moment]:
    """Of the load with seed 0, in order; those that nobody reaches are left out."""
    items = workload.mixed(256, LENGTHS, vocab_size=1000, seed=0)
    widths = EngineConfig(model="", max_num_seqs=len(items)).decode_widths
    found = []
    for step in steps:
        contexts = tuple(len(item.prompt) + step for item in items if item.output_len > step)
        if contexts:
            found.append(Moment(step, contexts, next(width for width in widths if width >= len(contexts))))
    return found


def total_s(steps: Sequence[int], milliseconds: Sequence[float]) -> float:
    """Of all steps between the first and the last moment, from the times of the moments."""
    pieces = pairwise(zip(steps, milliseconds, strict=True))
    return sum((after - before) * (first + last) / 2 for (before, first), (after, last) in pieces) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--fp8", action="store_true", help="keys and values of eight bits with a scale a head")
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    rows: list[dict[str, object]] = []
    for name in args.shape or SHAPES:
        shape, load = SHAPES[name], moments()
        num_cells = max(sum(moment.contexts) for moment in load) + 2 * STEPS * 256
        bench = Bench(shape, 256, num_cells, SCALED if args.fp8 else None)
        warm_clocks()
        times, floors = [], []
        for moment in load:
            bench.place(moment.contexts)
            graphs = bench.graphs(moment.width, plan_decode(shape, moment.width, hopper=hopper))
            times.append(bench.step_ms(graphs, rounds=2))
            floors.append(bench.floor_ms(moment.contexts))
            row = {
                "shape": name, "step": moment.step, "rows": len(moment.contexts), "width": moment.width,
                "cells": sum(moment.contexts), "step_ms": round(times[-1], 4), "floor_ms": round(floors[-1], 4),
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
        at = [moment.step for moment in load]
        print(f"{name}: {total_s(at, times):.3f} s, floor {total_s(at, floors):.3f} s", flush=True)
        rows.append({"shape": name, "seconds": total_s(at, times), "floor_s": total_s(at, floors)})
        del bench
    config = {
        "read_bytes_per_s": READ_BYTES_PER_S,
        "device": torch.cuda.get_device_name(),
        "lengths": LENGTHS,
        "fp8": args.fp8,
    }
    record("decode-mixed", config, {"rows": rows}, keep=args.keep)


if __name__ == "__main__":
    main()

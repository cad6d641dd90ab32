"""Tries other tiles for products inside whole captured steps, linear after linear, and keeps what is best.

    python -m benchmarks.step_tiles --quantization fp8 --rows 64 --layers 8 --keep

Of each linear the tile that the plan has is changed in one way at a time (columns, depth, parts of K, stages, warps,
weights that are asked for ahead, which side is the tensor cores' 64-row operand); the best of these is what the next
linear's are tried beside. What it prints goes into `worker.cuda.fp8_tiles` or `decode_plan` by hand. A try takes about
as long as the compiler.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from benchmarks.decode_step import SHAPES, STEPS, Bench, asking_ahead, warm_clocks
from benchmarks.record import record
from worker.cuda.decode_plan import DecodePlan, split_plan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.tiles import LinearTile

LINEARS = ("gate_up", "down", "qkv", "o")
CONTEXT = 256
AHEAD = (128, 256, 512, 1024)
# A change that gives less is noise.
LEAST_GAIN = 0.003


def sizes(shape: DecodeShape, linear: str) -> tuple[int, int]:
    """Columns and depth that a tile has to divide."""
    return {
        "qkv": (shape.qkv_columns, shape.hidden),
        "o": (shape.hidden, shape.query_columns),
        "gate_up": (shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
    }[linear]


def neighbours(tile: LinearTile, shape: DecodeShape, linear: str) -> Iterator[LinearTile]:
    """Tiles that differ from this one in one way."""
    columns, depth = sizes(shape, linear)
    changes: list[dict[str, Any]] = [
        {"columns": tile.columns * 2}, {"columns": tile.columns // 2}, {"depth": tile.depth * 2},
        {"depth": tile.depth * 2, "stages": max(2, tile.stages // 2)}, {"depth": tile.depth // 2},
        {"depth": tile.depth // 2, "stages": tile.stages * 2}, {"stages": tile.stages + 1},
        {"stages": tile.stages - 1}, {"warps": 12 - tile.warps}, {"swap": not tile.swap}, {"early": not tile.early},
    ]  # fmt: skip
    changes += [{"ahead": ahead} for ahead in (0, *AHEAD) if ahead != tile.ahead]
    if tile.rows == 16:
        changes.append({"rows": 8})
    if linear != "gate_up":
        changes += [{"splits": tile.splits * 2}, {"splits": tile.splits // 2}]
    for change in changes:
        other = replace(tile, **change)
        if min(other.columns, other.depth) < 32 or not 0 < other.splits <= 16 or other.stages < 2:
            continue
        if not other.swap and other.rows < 64:
            continue
        if other.divides(columns, depth):
            yield other


def step_ms(bench: Bench, width: int, plan: DecodePlan) -> float | None:
    """None where a kernel does not fit the device."""
    try:
        return bench.step_ms(bench.graphs(width, plan), rounds=3)
    except OutOfResources:
        return None


def tune(bench: Bench, width: int, linears: Sequence[str]) -> dict[str, Any]:
    """Every try of one width, and the plan's tiles in the end."""
    plan = split_plan(bench.shape, width)
    assert plan is not None
    bench.place([CONTEXT] * width)
    best = step_ms(bench, width, plan)
    assert best is not None
    first = best
    tries: list[dict[str, Any]] = []
    print(f"{width:3} rows, the plan {best:8.4f} ms", flush=True)
    for ahead in AHEAD:
        other = asking_ahead(plan, ahead)
        took = step_ms(bench, width, other)
        tries.append({"linear": "all", "ahead": ahead, "step_ms": took})
        print(f"{width:3} rows, {ahead} numbers ahead in all {took or float('nan'):8.4f} ms", flush=True)
        if took is not None and took < best * (1 - LEAST_GAIN):
            plan, best = other, took
    for linear in linears:
        tiles = plan.linear
        assert tiles is not None
        for tile in neighbours(getattr(tiles, linear), bench.shape, linear):
            other = replace(plan, linear=replace(tiles, **{linear: tile}))
            took = step_ms(bench, width, other)
            tries.append({"linear": linear, "tile": asdict(tile), "step_ms": took})
            print(f"{width:3} rows, {linear:8} {took or float('nan'):8.4f} ms (best {best:.4f})  {tile}", flush=True)
            if took is not None and took < best * (1 - LEAST_GAIN):
                plan, best = other, took
    assert plan.linear is not None
    chosen = {linear: asdict(getattr(plan.linear, linear)) for linear in LINEARS}
    for linear in LINEARS:
        print(f"{width:3} rows, best {linear:8} {getattr(plan.linear, linear)}", flush=True)
    return {"rows": width, "first_ms": first, "best_ms": best, "chosen": chosen, "tries": tries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="fp8", help="of the layers' matrices")
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    parser.add_argument("--linears", nargs="+", choices=LINEARS, default=LINEARS, help="those to try other tiles of")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    shape = replace(SHAPES[args.shape], quantization=args.quantization, windows=(None,) * args.layers)
    bench = Bench(shape, max(args.rows), max(args.rows) * (CONTEXT + 2 * STEPS))
    warm_clocks()
    found = [tune(bench, width, args.linears) for width in args.rows]
    shown = {
        "shape": args.shape,
        "quantization": args.quantization,
        "layers": args.layers,
        "context": CONTEXT,
        "device": torch.cuda.get_device_name(),
    }
    record("step-tiles", shown, {"widths": found}, keep=args.keep)


if __name__ == "__main__":
    main()

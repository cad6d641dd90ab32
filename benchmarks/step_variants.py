"""What a decode step gains from how its kernels start: variants of its plan, timed in turns.

    python -m benchmarks.step_variants --shape qwen3-0.6b --rows 1 8 64 --keep

Of each number of rows the plan is changed in one way at a time: whether a product lets the next kernel start when it
starts, whether products ask for weights while they wait, how attention is cut. A GPU's clock drifts by more than such a
change gives, so that all variants are captured first and then take turns; a figure is the median of the turns'. Changes
may be worth more together than one by one: those that win here are to be tried on top of each other.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch

from benchmarks.decode_step import SHAPES, STEPS, Bench, asking_ahead, warm_clocks
from benchmarks.record import record
from worker.config import Quantization
from worker.cuda.decode_plan import DecodePlan, plan_decode
from worker.cuda.graphs import DecodeGraphs

LAYER_PRODUCTS = ("qkv", "o", "gate_up", "down")
AHEAD = (0, 128, 512)


def with_early(plan: DecodePlan, names: tuple[str, ...], *, early: bool | None = None) -> DecodePlan:
    """These products start the next kernel early, or do not; without `early` each the other way round."""
    field = "gemv" if plan.gemv is not None else "linear"
    tiles: Any = getattr(plan, field)
    changed = {}
    for name in names:
        tile = getattr(tiles, name)
        changed[name] = replace(tile, early=not tile.early if early is None else early)
    return replace(plan, **{field: replace(tiles, **changed)})


def variants(plan: DecodePlan) -> Iterator[tuple[str, DecodePlan]]:
    """Names and plans, the plan itself first."""
    yield "as planned", plan
    if plan.gemv is not None or plan.linear is not None:
        for name in LAYER_PRODUCTS:
            yield f"{name} early or not", with_early(plan, (name,))
        yield "none early", with_early(plan, LAYER_PRODUCTS, early=False)
        yield "o, down early", with_early(plan, ("o", "down"), early=True)
    if plan.linear is not None:
        for ahead in AHEAD:
            yield f"{ahead} ahead", asking_ahead(plan, ahead)
            yield f"{ahead} ahead; o, down early", with_early(asking_ahead(plan, ahead), ("o", "down"), early=True)
    tile = plan.attention
    cuts: list[dict[str, Any]] = [{"warps": tile.warps * 2}]
    if tile.warps > 1:
        cuts.append({"warps": tile.warps // 2})
    if tile.splits > 1:
        cuts += [{"splits": tile.splits // 2}, {"splits": tile.splits * 2}, {"first": not tile.first}]
    if tile.pieces is not None:
        cuts += [{"pieces": tile.pieces // 2}, {"pieces": tile.pieces * 2}]
    for cut in cuts:
        shown = ", ".join(f"{name} {value}" for name, value in cut.items())
        yield f"attention: {shown}", replace(plan, attention=replace(tile, **cut))


def timed(bench: Bench, width: int, context: int, turns: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step: median, least and most of the turns."""
    bench.place([context] * width)
    plan = plan_decode(bench.shape, width, hopper=torch.cuda.get_device_capability() >= (9, 0))
    captured: dict[str, DecodeGraphs] = {}
    for name, variant in variants(plan):
        try:
            captured[name] = bench.graphs(width, variant)
        except Exception as error:  # noqa: BLE001 - the compiler's and the driver's own kinds; said and left out
            print(f"{width:3} rows, {name}: {type(error).__name__}: {error}"[:200], flush=True)
    warm_clocks()
    took: dict[str, list[float]] = {name: [] for name in captured}
    for _ in range(turns):
        for name, graphs in captured.items():
            warm_clocks(0.05)
            took[name].append(bench.step_ms(graphs, rounds=2))
    return {name: {"median": statistics.median(ms), "least": min(ms), "most": max(ms)} for name, ms in took.items()}


def print_table(width: int, steps: dict[str, dict[str, float]]) -> None:
    planned = steps["as planned"]["median"]
    for name, ms in steps.items():
        change = 100 * (ms["median"] / planned - 1)
        print(f"{width:3} rows  {name:28} {ms['median']:8.4f} ({ms['least']:.4f} .. {ms['most']:.4f}) {change:+.1f}%")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--quantization", choices=get_args(Quantization), default="none")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--layers", type=int, help="run fewer layers than the model has")
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    shape = replace(SHAPES[args.shape], quantization=args.quantization)
    if args.layers is not None:
        shape = replace(shape, windows=shape.windows[: args.layers])
    bench = Bench(shape, max(args.rows), max(args.rows) * (args.context + 2 * STEPS))
    found = {}
    for width in args.rows:
        found[str(width)] = timed(bench, width, args.context, args.turns)
        print_table(width, found[str(width)])
    shown = {name: getattr(args, name) for name in ("shape", "quantization", "context", "turns", "layers")}
    record(f"step-variants-{args.shape}", {**shown, "gpu": torch.cuda.get_device_name()}, found, keep=args.keep)


if __name__ == "__main__":
    main()

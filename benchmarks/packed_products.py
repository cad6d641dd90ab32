"""Times the products of a decode step one by one: matrices of four and eight bits in several tiles, beside bfloat16.

    python -m benchmarks.packed_products --shape llama-8b --rows 1 8 64 --keep

A graph has the same product of several matrices after each other, together larger than the L2 cache, as programmatic
dependents, as a step has them; a figure is the graph's median time over the number of matrices. The engine's own tile
comes first, and what there is no time left for is left out. Tiles that win here need not win in a step, where other
kernels run before and behind them: this says which of them to try there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.decode_step import READ_BYTES_PER_S, SHAPES
from benchmarks.packed_variants import Product, Tile, own_tile, variants
from benchmarks.record import record
from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_plan import split_plan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.gemv import head_gemv_kernel, normed_gate_up_gemv_kernel, normed_gemv_kernel, residual_gemv_kernel
from worker.cuda.linear import head_kernel
from worker.cuda.packed import PackedMatrix, pack_int4, pack_int8
from worker.cuda.packed_products import (
    gate_up_gemv,
    head_gemv,
    head_product,
    normed_gemv,
    residual_gemv,
)
from worker.cuda.step_products import StepProducts
from worker.cuda.tiles import GemvTile, LinearTile

NAMES: Final = ("qkv", "o", "gate_up", "down", "head")
_PADDED_ROWS: Final = 256
_MOST_SUMS: Final = 2048
_DISTINCT_BYTES: Final = 300e6
_REPLAYS: Final = 12


class Bench:
    """What products read and write beside their matrices."""

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        widest = max(shape.hidden, shape.query_columns, shape.ffn)
        plan = split_plan(replace(shape, quantization="int8"), _PADDED_ROWS)
        assert plan is not None
        assert plan.linear is not None
        cut = {name: replace(getattr(plan.linear, name), splits=8) for name in ("qkv", "o", "down")}
        self.plan = replace(plan, linear=replace(plan.linear, **cut))
        self.buffers = DecodeBuffers(shape, _PADDED_ROWS, [self.plan], self.device)
        self.step = StepProducts(shape, self.buffers)
        self.x = torch.randn(_PADDED_ROWS * widest, device=self.device).bfloat16()
        self.sums = torch.full((_MOST_SUMS,), shape.hidden / _MOST_SUMS, device=self.device)
        self.norm = torch.ones(shape.hidden, dtype=torch.bfloat16, device=self.device)

    def products(self) -> list[Product]:
        s = self.shape
        sizes = (
            (s.qkv_columns, s.hidden), (s.hidden, s.query_columns), (2 * s.ffn, s.hidden), (s.hidden, s.ffn),
            (s.vocab_size, s.hidden),
        )  # fmt: skip
        return [Product(name, *size) for name, size in zip(NAMES, sizes, strict=True)]

    def matrices(self, product: Product, bits: int) -> list[Tensor]:
        """As many as make a graph that no cache holds."""
        count = max(2, int(_DISTINCT_BYTES // (product.columns * product.depth * bits // 8)))
        made: list[Tensor] = []
        for _ in range(count):
            plain = (torch.randn(product.columns, product.depth, device=self.device) * 0.02).bfloat16()
            made.append(plain if bits == 16 else pack_int8(plain) if bits == 8 else pack_int4(plain))
        return made

    def launch(self, product: Product, matrix: Tensor, rows: int, tile: Tile) -> None:
        x = self.x[: _PADDED_ROWS * product.depth].view(_PADDED_ROWS, product.depth)
        if product.name == "head":
            self._head(x, matrix, rows, tile)
        elif isinstance(tile, GemvTile):
            self._row(product, matrix, tile)
        elif product.is_gate_up:
            self.step.gate_up(x, matrix, rows, self.plan, tile)
        else:
            self.step.split(x, matrix, rows, self.plan, tile)

    def _row(self, product: Product, matrix: Tensor, tile: GemvTile) -> None:
        x, sums, b, n, k = self.x, self.sums, self.buffers, product.columns, product.depth
        options = self.plan.launch(tile.warps)
        if isinstance(matrix, PackedMatrix):
            if product.is_gate_up:
                gate_up_gemv(x, sums, _MOST_SUMS, 0.0, matrix, b.active, tile, options)
            elif product.name == "qkv":
                normed_gemv(x, sums, _MOST_SUMS, 0.0, matrix, b.partials, tile, options)
            else:
                residual_gemv(x, matrix, b.residual, self.norm, b.normed, sums, tile, options)
            return
        shared = {"K": k, "COLUMNS": tile.columns, "DEPTH": tile.depth, **options}
        normed = {"MAX_SUMS": _MOST_SUMS, "EARLY": tile.early, **shared}
        if product.is_gate_up:
            grid = (n // 2 // tile.columns,)
            normed_gate_up_gemv_kernel[grid](x, sums, matrix, b.active, _MOST_SUMS, 0.0, N=n // 2, **normed)
        elif product.name == "qkv":
            normed_gemv_kernel[(n // tile.columns,)](x, sums, matrix, b.partials, _MOST_SUMS, 0.0, **normed)
        else:
            residual_gemv_kernel[(n // tile.columns,)](
                x, matrix, b.residual, self.norm, b.normed, sums, EARLY=tile.early, **shared
            )

    def _head(self, x: Tensor, matrix: Tensor, rows: int, tile: Tile) -> None:
        """Without logits, as a step of greedy rows."""
        b = self.buffers
        (n, k), ends, programs = matrix.shape, (b.logits, b.best, b.best_id), -(-len(matrix) // tile.columns)
        options = self.plan.launch(tile.warps, tile.stages if isinstance(tile, LinearTile) else 2)
        shared = {"N": n, "K": k, "COLUMNS": tile.columns, "DEPTH": tile.depth, "STORE_LOGITS": False, **options}
        if isinstance(tile, GemvTile):
            if isinstance(matrix, PackedMatrix):
                head_gemv(x, self.sums, _MOST_SUMS, 0.0, matrix, *ends, tile, options, store_logits=False)
            else:
                head_gemv_kernel[(programs,)](
                    x, self.sums, matrix, *ends, _MOST_SUMS, 0.0, MAX_SUMS=_MOST_SUMS, **shared
                )
        elif isinstance(matrix, PackedMatrix):
            head_product(x, matrix, *ends, rows, tile, options, store_logits=False)
        else:
            grid = (-(-rows // tile.rows), programs)
            head_kernel[grid](x, matrix, *ends, rows, programs, ROWS=tile.rows, SWAP=tile.swap, **shared)

    def microseconds(self, product: Product, matrices: Sequence[Tensor], rows: int, tile: Tile) -> float:
        """Of one product, the median."""

        def run() -> None:
            for matrix in matrices:
                self.launch(product, matrix, rows, tile)

        return _graph_microseconds(run) / len(matrices)


def _graph_microseconds(run: Callable[[], None]) -> float:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # compiles, outside of the capture
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(1e3 * start.elapsed_time(end)))
    return float(statistics.median(times))


def run(shape: DecodeShape, rows: Sequence[int], kinds: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    bench, ends = Bench(shape, torch.device("cuda")), time.monotonic() + seconds
    figures: list[dict[str, Any]] = []
    for product in bench.products():
        for bits in kinds:
            if product.name == "head" and bits == 4:  # it has eight
                continue
            matrices = bench.matrices(product, bits)
            stored = sum(part.nbytes for part in _parts(matrices[0]))
            for width in rows:
                own = own_tile(shape, product, width, bits)
                for tile in () if own is None else [own] if bits == 16 else variants(product, bits, own):
                    if time.monotonic() > ends and tile != own:
                        break
                    took = _timed(bench, product, matrices, width, tile)
                    figures.append(
                        {
                            "product": product.name, "bits": bits, "rows": width, "us": took, "own": tile == own,
                            "floor_us": 1e6 * stored / READ_BYTES_PER_S, "tile": asdict(tile),
                        }
                    )  # fmt: skip
            del matrices
        ends += seconds  # each product has as long
    return figures


def _timed(bench: Bench, product: Product, matrices: Sequence[Tensor], rows: int, tile: Tile) -> float | str:
    """Microseconds, or why a tile does not run: some want more shared memory or registers than there are."""
    try:
        return bench.microseconds(product, matrices, rows, tile)
    except Exception as error:  # noqa: BLE001 - the compiler's and the driver's own kinds; told in the result
        return f"{type(error).__name__}: {error}"[:200]


def _parts(matrix: Tensor) -> list[Tensor]:
    return [matrix.codes, matrix.scales] if isinstance(matrix, PackedMatrix) else [matrix]


def print_table(figures: Sequence[dict[str, Any]]) -> None:
    """For each product and number of rows: bfloat16, and of either kind the engine's tile and the best one."""
    timed = [each for each in figures if isinstance(each["us"], float)]
    for figure in figures:
        if isinstance(figure["us"], str):
            print(f"{figure['product']} {figure['bits']} bits, {figure['rows']} rows, {figure['tile']}: {figure['us']}")
    for product, rows in dict.fromkeys((each["product"], each["rows"]) for each in timed):
        line = f"{product:8} {rows:4} rows"
        for bits in (16, 8, 4):
            found = [each for each in timed if (each["product"], each["rows"], each["bits"]) == (product, rows, bits)]
            if not found:
                continue
            best, own = min(found, key=lambda each: each["us"]), next((each for each in found if each["own"]), None)
            line += f" | {bits:2} bits, floor {best['floor_us']:5.1f}:"
            line += " no own" if own is None else f" own {own['us']:6.1f}"
            if bits < 16:
                changed = [f"{k}={v}" for k, v in best["tile"].items() if own is None or own["tile"].get(k) != v]
                line += f", best {best['us']:6.1f} ({' '.join(changed) or 'own'})"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--bits", type=int, nargs="+", choices=(16, 8, 4), default=[16, 8, 4])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each of the five products, beyond own tiles")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = run(SHAPES[options.shape], options.rows, options.bits, options.seconds)
    print_table(figures)
    config = {"shape": options.shape, "rows": options.rows, "bits": options.bits, "gpu": torch.cuda.get_device_name()}
    record("packed-products", config, {"products": figures}, keep=options.keep)


if __name__ == "__main__":
    main()

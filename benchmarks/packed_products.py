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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.decode_step import READ_BYTES_PER_S, SHAPES
from benchmarks.record import record
from worker.cuda.decode_plan import plan_decode
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.gemv import normed_gate_up_gemv_kernel, normed_gemv_kernel, residual_gemv_kernel
from worker.cuda.linear import gate_up_kernel, split_linear_kernel
from worker.cuda.packed import PackedMatrix, pack_int4, pack_int8
from worker.cuda.packed_products import gate_up_gemv, gate_up_product, normed_gemv, residual_gemv, split_product
from worker.cuda.packed_tiles import gate_up_tile, gemv_tile, product_tile
from worker.cuda.tiles import GemvTile, LinearTile

Tile = GemvTile | LinearTile
NAMES: Final = ("qkv", "o", "gate_up", "down")
_PADDED_ROWS: Final = 256
_MOST_SUMS: Final = 2048
_DISTINCT_BYTES: Final = 300e6
_REPLAYS: Final = 12


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [columns, depth]; gate and up are one, whose halves are multiplied with each other."""

    name: str
    columns: int
    depth: int

    @property
    def is_gate_up(self) -> bool:
        return self.name == "gate_up"


class Bench:
    """What products read and write beside their matrices."""

    def __init__(self, shape: DecodeShape) -> None:
        self.shape, self.device = shape, torch.device("cuda")
        widest = max(shape.hidden, shape.query_columns, shape.ffn)
        self.x = torch.randn(_PADDED_ROWS, widest, device=self.device).bfloat16()
        self.sums = torch.full((_MOST_SUMS,), shape.hidden / _MOST_SUMS, device=self.device)
        self.partials = torch.empty(8 * _PADDED_ROWS * max(shape.qkv_columns, shape.hidden), device=self.device)
        self.active = torch.empty(_PADDED_ROWS, shape.ffn, dtype=torch.bfloat16, device=self.device)
        self.residual, self.norm, self.scaled = (
            torch.randn(shape.hidden, device=self.device).bfloat16() for _ in range(3)
        )

    def products(self) -> list[Product]:
        s = self.shape
        sizes = ((s.qkv_columns, s.hidden), (s.hidden, s.query_columns), (2 * s.ffn, s.hidden), (s.hidden, s.ffn))
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
        options = {"PDL": True, "launch_pdl": True, "num_warps": tile.warps}
        if isinstance(tile, GemvTile):
            self._row(product, matrix, tile, options | {"num_stages": 2})
        else:
            self._rows(product, matrix, rows, tile, options | {"num_stages": tile.stages})

    def _row(self, product: Product, matrix: Tensor, tile: GemvTile, options: dict[str, Any]) -> None:
        x, sums, out, n, k = self.x, self.sums, self.partials, product.columns, product.depth
        if isinstance(matrix, PackedMatrix):
            if product.is_gate_up:
                gate_up_gemv(x, sums, _MOST_SUMS, 0.0, matrix, self.active, tile, options)
            elif product.name == "qkv":
                normed_gemv(x, sums, _MOST_SUMS, 0.0, matrix, out, tile, options)
            else:
                residual_gemv(x, matrix, self.residual, self.norm, self.scaled, sums, tile, options)
            return
        shared = {"K": k, "COLUMNS": tile.columns, "DEPTH": tile.depth, **options}
        if product.is_gate_up:
            normed_gate_up_gemv_kernel[(n // 2 // tile.columns,)](
                x, sums, matrix, self.active, _MOST_SUMS, 0.0, N=n // 2, MAX_SUMS=_MOST_SUMS, EARLY=tile.early, **shared
            )
        elif product.name == "qkv":
            normed_gemv_kernel[(n // tile.columns,)](
                x, sums, matrix, out, _MOST_SUMS, 0.0, MAX_SUMS=_MOST_SUMS, EARLY=tile.early, **shared
            )
        else:
            residual_gemv_kernel[(n // tile.columns,)](x, matrix, self.residual, self.norm, self.scaled, sums, **shared)

    def _rows(self, product: Product, matrix: Tensor, rows: int, tile: LinearTile, options: dict[str, Any]) -> None:
        n, k, stride = product.columns, product.depth, _PADDED_ROWS * product.columns
        x = self.x.view(-1)[: _PADDED_ROWS * k].view(_PADDED_ROWS, k)
        if isinstance(matrix, PackedMatrix):
            if product.is_gate_up:
                gate_up_product(x, matrix, self.active, rows, tile, options)
            else:
                split_product(x, matrix, self.partials, rows, stride, tile, options)
            return
        shared = {
            "K": k, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SWAP": tile.swap,
            "EARLY": tile.early, **options,
        }  # fmt: skip
        if product.is_gate_up:
            grid = (n // 2 // tile.columns, -(-rows // tile.rows))
            gate_up_kernel[grid](x, matrix, self.active, rows, N=n // 2, **shared)
        else:
            split_grid = (n // tile.columns, tile.splits, -(-rows // tile.rows))
            split_linear_kernel[split_grid](x, matrix, self.partials, rows, stride, N=n, SPLITS=tile.splits, **shared)

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


def own_tile(shape: DecodeShape, product: Product, rows: int, bits: int) -> Tile | None:
    """What the engine runs; of bfloat16 none where the library does."""
    if bits < 16 and rows == 1:
        gemv = gemv_tile(bits, product.columns, product.depth)
        return replace(gemv, columns=gemv.columns // 2) if gemv is not None and product.is_gate_up else gemv
    if bits < 16 and product.is_gate_up:
        return gate_up_tile(bits, rows, product.columns // 2, product.depth)
    if bits < 16:
        return product_tile(bits, rows, product.columns, product.depth)
    plan = plan_decode(shape, rows, hopper=True)
    tiles = plan.gemv or plan.linear
    tile: Tile | None = None if tiles is None else getattr(tiles, product.name)
    return tile


def variants(product: Product, bits: int, own: Tile) -> Iterable[Tile]:
    """The engine's own and what may be better, the most telling first."""
    yield own
    if isinstance(own, GemvTile):
        for columns, warps in ((8, 2), (16, 2), (8, 4), (16, 4), (16, 1), (8, 8)):
            each = columns // 2 if product.is_gate_up else columns
            tile = GemvTile(each, warps * 32 * 128 // bits, warps)
            if tile != own and product.columns % columns == 0:
                yield tile
        yield replace(own, early=True)
        return
    other_splits = () if product.is_gate_up else (own.splits // 2, own.splits * 2)
    for splits in other_splits:
        if splits and product.depth % (splits * own.depth) == 0 and splits <= 8:
            yield replace(own, splits=splits)
    for stages in (own.stages - 1, own.stages + 1):
        yield replace(own, stages=stages)
    wide = own.columns * (2 if product.is_gate_up else 1) == 128
    depth = own.depth * 2 if wide and bits == 4 and own.rows < 64 else own.depth // 2 if not wide else own.depth
    columns = own.columns // 2 if wide else own.columns * 2
    if product.columns % columns == 0 and product.depth % (own.splits * depth) == 0:
        yield replace(own, columns=columns, depth=depth, warps=4)
    yield replace(own, warps=12 - own.warps)  # 8 for 4 and 4 for 8
    if own.depth > 64:
        yield replace(own, depth=own.depth // 2, stages=own.stages + 1)


def run(shape: DecodeShape, rows: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    bench, ends = Bench(shape), time.monotonic() + seconds
    figures: list[dict[str, Any]] = []
    for product in bench.products():
        for bits in (16, 8, 4):
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
    parser.add_argument("--seconds", type=float, default=40.0, help="for each of the four products, beyond own tiles")
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    figures = run(SHAPES[options.shape], options.rows, options.seconds)
    print_table(figures)
    config = {"shape": options.shape, "rows": options.rows, "gpu": torch.cuda.get_device_name()}
    record("packed-products", config, {"products": figures}, keep=options.keep)


if __name__ == "__main__":
    main()

"""Which of the vendor library's kernels are the fastest for products of wide steps: all of their tiles are tried.

    python -m benchmarks.library_tiles --shape llama-8b --rows 96 128 192 256 --keep

`worker.cuda.vendor_products` tries a few at each start; this says which those should be, and what is left to be won.
Every tile is tried in two clusters and three orders, then every cluster and order of the best tiles, then the best of
all once more, beside torch's product. Microseconds of a launch, over matrices that no cache holds together.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.decode_step import SHAPES, warm_clocks
from benchmarks.record import record
from worker.cuda.cublas_lt import CublasLt, Kernel, Product, ProductShape, Tiling
from worker.cuda.decode_plan import plan_decode
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.vendor_products import Trial, microseconds, offered

CLUSTERS, ORDERS = (2, 3, 4, 5, 7, 8), range(8)
FIRST_CLUSTERS, FIRST_ORDERS = (3, 5), (0, 1, 4)
BEST_TILES, FINALISTS = 10, 20
MATRIX_BYTES = 600_000_000


def products_of(shape: DecodeShape, rows: int) -> dict[str, ProductShape]:
    """Those of a layer, as a step of so many rows has them."""
    sizes = {
        "qkv": (shape.qkv_columns, shape.hidden),
        "output": (shape.hidden, shape.query_columns),
        "gate_up": (2 * shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
    }
    down_parts = plan_decode(shape, rows, hopper=True).down_parts
    found = {name: ProductShape(rows, *size, shape.dtype) for name, size in sizes.items()}
    if down_parts > 1:
        found["down"] = replace(found["down"], parts=down_parts, part_stride=rows * shape.hidden)
    return found


class Search:
    """For one product."""

    def __init__(self, library: CublasLt, shape: ProductShape, device: torch.device) -> None:
        count = max(4, MATRIX_BYTES // (2 * shape.columns * shape.depth))
        self._x = torch.randn(shape.rows, shape.depth, device=device).to(shape.dtype)
        sizes = (shape.columns, shape.depth)
        self._matrices = [(torch.randn(*sizes, device=device) * 0.02).to(shape.dtype) for _ in range(count)]
        self._product: Product = library.product(shape)
        out = torch.empty(shape.out_numel, dtype=shape.out_dtype, device=device)
        self._trial = Trial(self._product, self._x, self._matrices, out)
        self._kernels: dict[Tiling, Kernel] = {}
        self._took: dict[Tiling, float] = {}

    def run(self) -> dict[str, Any]:
        """Microseconds: torch's product, the best of those that a start chooses among, and of all; and what that one
        is. Of a product whose K the library would cut, torch's alone."""
        at_start = offered(self._product)
        if not at_start:
            return {"tried": 0, "torch": self._torchs()}
        first = at_start[0]
        self._screen(at_start)
        tiles = self._product.tiles(first)
        self._try([Tiling(t, c, o) for t in tiles for c in FIRST_CLUSTERS for o in FIRST_ORDERS], first)
        best = list(dict.fromkeys(tiling.tile for tiling in self._fastest()))[:BEST_TILES]
        self._try([Tiling(tile, cluster, order) for tile in best for cluster in CLUSTERS for order in ORDERS], first)
        finalists = dict.fromkeys([*self._fastest()[:FINALISTS], *(kernel.tiling for kernel in at_start)])
        took = self._trial.microseconds([self._kernels[tiling] for tiling in finalists], launches=8, rounds=5)
        winner = min(took, key=lambda tiling: took[tiling])
        alike = self._trial.alike(first, [kernel for kernel in at_start if kernel.tiling in took])
        return {
            "tried": len(self._took),
            "torch": self._torchs(),
            "heuristics_first": took.get(first.tiling),
            "at_start": min(took[kernel.tiling] for kernel in alike),
            "best": took[winner],
            "tiling": [winner.tile, winner.cluster, winner.order],
        }

    def _try(self, tilings: Iterable[Tiling], like: Kernel) -> None:
        new = [tiling for tiling in dict.fromkeys(tilings) if tiling not in self._kernels]
        self._screen([kernel for tiling in new if (kernel := self._product.variant(like, tiling)) is not None])

    def _screen(self, kernels: list[Kernel]) -> None:
        self._kernels |= {kernel.tiling: kernel for kernel in kernels}
        self._took |= self._trial.microseconds(kernels, launches=2, rounds=1)

    def _fastest(self) -> list[Tiling]:
        return sorted(self._took, key=lambda tiling: self._took[tiling])

    def _torchs(self) -> float:
        shape = self._product.shape
        out = torch.empty(shape.rows, shape.columns, dtype=shape.dtype, device=self._x.device)
        launches = [partial(torch.mm, self._x, w.t(), out=out) for w in self._matrices[:8]]
        return microseconds({"torch": launches}, rounds=5)["torch"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[80, 96, 128, 160, 192, 224, 256])
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    shape, device, found = SHAPES[args.shape], torch.device("cuda"), {}
    library = CublasLt(device)
    for rows in args.rows:
        for name, product in products_of(shape, rows).items():
            warm_clocks(0.1)
            figures = Search(library, product, device).run()
            print(rows, name, figures, flush=True)
            found[f"{name}, {rows} rows"] = figures
    config = {"shape": args.shape, "gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    record(f"library-tiles-{args.shape}", config, found, keep=args.keep)


if __name__ == "__main__":
    main()

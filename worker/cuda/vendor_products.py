"""Products of wide steps by the vendor's library, each by the fastest of its kernels that was found at the start.

What the library's heuristic names first is up to a quarter slower than the best it has
(docs/gpu_decode_notes.md). So each product of a step is tried, over the model's own matrices: by all that the
heuristic names and by those of `TILINGS` that the library has. Only kernels that give the numbers of the first are
chosen among, as those do that sum K in the same order, so that which one wins changes no answer; how many parts K is
cut into, which does, is not chosen by time.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from worker.cuda.cublas_lt import CublasLt, Kernel, Product, ProductShape, Tiling, VendorError

logger = logging.getLogger(__name__)

TILINGS: Final = tuple(
    Tiling(*numbers)
    for numbers in (
        (18, 2, 0), (20, 5, 0), (27, 2, 0), (28, 5, 6), (30, 3, 0), (33, 4, 5), (33, 5, 7), (135, 5, 4), (136, 2, 0),
        (145, 2, 2), (158, 7, 4), (166, 2, 2), (183, 2, 0), (189, 5, 0), (196, 2, 0), (220, 2, 0), (221, 3, 4),
        (221, 5, 4), (222, 3, 4), (233, 2, 0), (315, 2, 1), (319, 5, 3), (320, 2, 1), (321, 2, 1), (323, 2, 1),
        (396, 2, 5), (398, 2, 1), (400, 5, 5), (400, 7, 1), (402, 2, 5), (403, 5, 7), (404, 2, 1), (406, 4, 7),
        (414, 4, 7),
    )
)  # fmt: skip
"""Of 2,300 that were tried with products of models of 3 to 14 billion parameters and 80 to 256 rows on an H200, those
that together leave the least to be won (`benchmarks/library_tiles.py`)."""

_FINALISTS: Final = 6


class VendorProducts:
    """For one model on one GPU. Owner: whoever builds an executor; used on its thread."""

    def __init__(self, device: torch.device) -> None:
        """Raises OSError where the library is not there."""
        self._library = CublasLt(device)
        self._device = device
        self._chosen: dict[ProductShape, tuple[Product, Kernel]] = {}

    def choose(self, shape: ProductShape, matrices: Sequence[Tensor], out_stride: int) -> None:
        """Finds the fastest kernel of a product with such `matrices`, a model's own: so many that no cache holds them
        all, since a step reads each once. `out_stride`: elements between the sums of its parts. Takes some 20 ms, and
        longer where kernels are used for the first time in the process, since that loads them.

        Chooses none where the library would cut K: it adds parts up in ways that give other numbers, and so few tiles
        are faster cut."""
        if shape in self._chosen:
            return
        product = self._library.product(shape, out_stride)
        kernels = offered(product)
        if not kernels:
            return
        x = torch.randn(shape.rows, shape.depth, device=self._device).to(shape.dtype)
        out = torch.empty(
            (shape.parts - 1) * out_stride + shape.rows * shape.columns, dtype=shape.out_dtype, device=x.device
        )
        trial = Trial(product, x, matrices, out)
        screened = trial.microseconds(kernels, launches=3, rounds=1)
        usable = [kernel for kernel in kernels if kernel.tiling in screened]
        fastest = sorted(usable, key=lambda kernel: screened[kernel.tiling])[:_FINALISTS]
        best = trial.alike(kernels[0], fastest)
        took = trial.microseconds(best, launches=8, rounds=5)
        self._chosen[shape] = product, min(best, key=lambda kernel: took[kernel.tiling])

    def takes(self, shape: ProductShape) -> bool:
        return shape in self._chosen

    def run(self, shape: ProductShape, x: Tensor, w: Tensor, out: Tensor) -> None:
        """out = x times w transposed, by the kernel that was chosen for the shape; `out` as `Product.run` takes it."""
        product, kernel = self._chosen[shape]
        product.launcher(x, w, out, kernel)()


def vendor_products(device: torch.device) -> VendorProducts | None:
    """None, which the log tells of, where torch has no such library: of another vendor, say."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return VendorProducts(device)
    except OSError as error:
        logger.warning("products of wide steps run as the library's heuristic says: %s", error)
        return None


def offered(product: Product) -> list[Kernel]:
    """All kernels that are worth a try: the heuristic's first, others of its kind that it names, and variants. None
    where the first cuts K, or where there is none."""
    suggested = product.suggested()
    if not suggested or suggested[0].cuts_depth:
        return []
    first, known = suggested[0], {kernel.tiling for kernel in suggested}
    named = [kernel for kernel in suggested if kernel.kind == first.kind and not kernel.cuts_depth]
    variants = (product.variant(first, tiling) for tiling in TILINGS if tiling not in known)
    return named + [kernel for kernel in variants if kernel is not None]


class Trial:
    """Launches kernels of one product of x with `matrices`, into `out`, and says how long they take."""

    def __init__(self, product: Product, x: Tensor, matrices: Sequence[Tensor], out: Tensor) -> None:
        self._product, self._x, self._matrices, self._out = product, x, matrices, out
        self._next = 0

    def microseconds(self, kernels: Sequence[Kernel], launches: int, rounds: int) -> dict[Tiling, float]:
        """The median of a launch of each kernel in `rounds` turns of so many launches, behind one to warm up. Without
        those that the library refuses to launch."""
        ready = {kernel.tiling: self._launches(kernel, launches) for kernel in kernels if self._launches_at_all(kernel)}
        marks: dict[Tiling, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {tiling: [] for tiling in ready}
        for _ in range(rounds):
            for tiling, run in ready.items():
                before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                before.record()
                for launch in run:
                    launch()
                after.record()
                marks[tiling].append((before, after))
        torch.cuda.synchronize(self._x.device)
        return {
            tiling: statistics.median(before.elapsed_time(after) for before, after in pairs) / launches * 1e3
            for tiling, pairs in marks.items()
        }

    def _launches_at_all(self, kernel: Kernel) -> bool:
        try:
            self._product.launcher(self._x, self._matrices[0], self._out, kernel)()
        except VendorError:
            return False
        return True

    def alike(self, first: Kernel, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The first, and those that give the same numbers."""
        w = self._matrices[0]

        def product(kernel: Kernel) -> Tensor:
            self._out.fill_(float("nan"))
            self._product.launcher(self._x, w, self._out, kernel)()
            return self._out.nan_to_num()  # what lies between the parts is nobody's

        expected = product(first)
        others = [kernel for kernel in kernels if kernel is not first and torch.equal(product(kernel), expected)]
        return [first, *others]

    def _launches(self, kernel: Kernel, count: int) -> list[Callable[[], None]]:
        """So many, each over the next matrix."""
        first, self._next = self._next, self._next + count
        matrices = [self._matrices[at % len(self._matrices)] for at in range(first, first + count)]
        return [self._product.launcher(self._x, w, self._out, kernel) for w in matrices]

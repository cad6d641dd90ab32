"""Products of wide steps by the vendor's library, each by the fastest of its kernels that was found at the start.

What the library's heuristic names first takes up to 1.4 times as long as the best it has
(docs/gpu_decode_notes.md). So each product of a step is tried, over the model's own matrices: by all that the
heuristic names and by those of `TILINGS` that the library has. One is chosen only if it gives the very numbers of the
first, as kernels do that sum K in the same order: so which one wins changes no answer. Into how many parts K is cut,
which does change them, is not chosen by time.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from worker.cuda.cublas_lt import CublasLt, Kernel, Product, ProductShape, Tiling, VendorError

logger = logging.getLogger(__name__)
Key = TypeVar("Key")

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
that together leave the least to be won (`benchmarks/library_tiles.py`). On other generations, which have other kernels,
only what the heuristic names is tried."""

_HOPPER: Final = 9  # of a compute capability

_FINALISTS: Final = 6


class VendorProducts:
    """For one model on one GPU. Owner: whoever builds an executor; used on its thread."""

    def __init__(self, library: CublasLt) -> None:
        self._library = library
        self._chosen: dict[ProductShape, tuple[Product, Kernel] | None] = {}  # None: it is left to torch

    def choose(self, shape: ProductShape, matrices: Sequence[Tensor]) -> bool:
        """Finds the fastest kernel of a product with such `matrices`, a model's own: so many that no cache holds them
        all, since a step reads each once. Takes some 20 ms, and longer where kernels are used for the first time in the
        process, since that loads them. False if the shape has been tried before.

        Chooses none where the library would cut K: it adds parts up in ways that give other numbers, and so few tiles
        are faster cut. None, too, where the library refuses, which the log tells of."""
        if shape in self._chosen:
            return False
        try:
            self._chosen[shape] = self._fastest(shape, matrices)
        except VendorError as error:
            logger.warning("%s runs as the library's heuristic says: %s", shape, error)
            self._chosen[shape] = None
        return True

    def takes(self, shape: ProductShape) -> bool:
        return self._chosen.get(shape) is not None

    def run(self, shape: ProductShape, x: Tensor, w: Tensor, out: Tensor) -> None:
        """out = x times w transposed, by the kernel that was chosen for the shape; operands as `Product.launcher` takes
        them."""
        chosen = self._chosen[shape]
        assert chosen is not None
        product, kernel = chosen
        product.launcher(x, w, out, kernel)()

    def _fastest(self, shape: ProductShape, matrices: Sequence[Tensor]) -> tuple[Product, Kernel] | None:
        product = self._library.product(shape)
        device = matrices[0].device
        kernels = offered(product, TILINGS if torch.cuda.get_device_capability(device)[0] == _HOPPER else ())
        if not kernels:
            return None
        # The same rows in each process, so that all find the same kernels alike.
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(shape.rows, shape.depth, device=device, generator=generator).to(shape.dtype)
        out = torch.empty(shape.out_numel, dtype=shape.out_dtype, device=device)
        trial = Trial(product, x, matrices, out)
        screened = trial.microseconds(kernels, launches=3, rounds=1)
        usable = [kernel for kernel in kernels if kernel.tiling in screened]
        fastest = sorted(usable, key=lambda kernel: screened[kernel.tiling])[:_FINALISTS]
        best = trial.alike(kernels[0], fastest)
        took = trial.microseconds(best, launches=8, rounds=5)
        return product, min(best, key=lambda kernel: took[kernel.tiling])


def vendor_products(device: torch.device) -> VendorProducts | None:
    """None on a CPU, on another vendor's GPU, and, which the log tells of, where the library does not start."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return VendorProducts(CublasLt(device))
    except (OSError, VendorError) as error:
        logger.warning("products of wide steps run as the library's heuristic says: %s", error)
        return None


def offered(product: Product, tilings: Sequence[Tiling] = TILINGS) -> list[Kernel]:
    """All kernels that are worth a try, one of each tiling: the heuristic's first, others of its kind that it names,
    and those of `tilings` that the library has. None where the first cuts K, or where there is none."""
    suggested = product.suggested()
    if not suggested or suggested[0].cuts_depth:
        return []
    first = suggested[0]
    found: dict[Tiling, Kernel] = {}
    for kernel in suggested:
        # Older kernels of one tiling differ in more than that, and the first is thought the fastest.
        if kernel.kind == first.kind and not kernel.cuts_depth:
            found.setdefault(kernel.tiling, kernel)
    for tiling in tilings:
        if tiling not in found and (variant := product.variant(first, tiling)) is not None:
            found[tiling] = variant
    return list(found.values())


def microseconds(runs: Mapping[Key, Sequence[Callable[[], object]]], rounds: int) -> dict[Key, float]:
    """Of the device, for one of a run's launches: the median of `rounds`, in each of which all runs take turns. Nothing
    is waited for in between."""
    marks: dict[Key, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, launches in runs.items():
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            before.record()
            for launch in launches:
                launch()
            after.record()
            marks[key].append((before, after))
    torch.cuda.synchronize()
    return {
        key: statistics.median(before.elapsed_time(after) for before, after in pairs) / len(runs[key]) * 1e3
        for key, pairs in marks.items()
    }


class Trial:
    """Launches kernels of one product of x with `matrices`, into `out`, and says how long they take."""

    def __init__(self, product: Product, x: Tensor, matrices: Sequence[Tensor], out: Tensor) -> None:
        self._product, self._x, self._matrices, self._out = product, x, matrices, out
        self._next = 0

    def microseconds(self, kernels: Sequence[Kernel], launches: int, rounds: int) -> dict[Tiling, float]:
        """The median of a launch of each kernel in `rounds` turns of so many launches, behind one to warm up. Without
        those that the library refuses to launch."""
        usable = [kernel for kernel in kernels if self._launches_at_all(kernel)]
        return microseconds({kernel.tiling: self._launches(kernel, launches) for kernel in usable}, rounds)

    def _launches_at_all(self, kernel: Kernel) -> bool:
        try:
            self._product.launcher(self._x, self._matrices[0], self._out, kernel)()
        except VendorError:
            return False
        return True

    def alike(self, first: Kernel, kernels: Sequence[Kernel]) -> list[Kernel]:
        """The first, and those that give the same numbers. Raises `VendorError` where the library refuses one."""
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

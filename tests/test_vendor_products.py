"""Which of the vendor library's kernels are tried for a product, and that what it refuses is left to torch: with a
library that is scripted, and without a GPU."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from worker.cuda.cublas_lt import Algorithm, Kernel, ProductShape, Tiling, VendorError
from worker.cuda.vendor_products import TILINGS, VendorProducts, microseconds, offered, vendor_products

SHAPE = ProductShape(96, 4096, 4096, torch.bfloat16)


def kernel(tiling: Tiling, *, kind: int = 66, cuts_depth: bool = False) -> Kernel:
    return Kernel(kind, tiling, Algorithm(), cuts_depth)


class ScriptedProduct:
    """Suggests what it is told to, and has the variants `has`."""

    def __init__(self, suggested: list[Kernel], has: tuple[Tiling, ...] = ()) -> None:
        self._suggested, self._has = suggested, has

    def suggested(self) -> list[Kernel]:
        return self._suggested

    def variant(self, like: Kernel, tiling: Tiling) -> Kernel | None:
        return replace(like, tiling=tiling) if tiling in self._has else None


def tried(*suggested: Kernel, has: tuple[Tiling, ...] = ()) -> list[Kernel]:
    product: Any = ScriptedProduct(list(suggested), has)
    return offered(product)


def test_the_heuristics_first_comes_first_and_then_what_else_the_library_has_of_its_kind() -> None:
    first, second = kernel(Tiling(1, 2, 0)), kernel(Tiling(2, 2, 0))
    assert tried(first, second, has=TILINGS[3:5]) == [first, second, *(replace(first, tiling=t) for t in TILINGS[3:5])]


def test_kernels_of_one_tiling_are_tried_once_as_the_one_that_the_heuristic_thinks_the_fastest() -> None:
    first, again = kernel(TILINGS[0]), kernel(TILINGS[0])
    found = tried(first, again, has=TILINGS[:1])
    assert len(found) == 1
    assert found[0] is first


@pytest.mark.parametrize("changes", [{"kind": 7}, {"cuts_depth": True}])
def test_a_tiling_that_is_suggested_for_other_kernels_is_tried_with_those_of_the_first(changes: dict[str, Any]) -> None:
    first, other = kernel(Tiling(1, 2, 0)), kernel(TILINGS[0], **changes)
    assert tried(first, other, has=TILINGS[:1]) == [first, replace(first, tiling=TILINGS[0])]


def test_without_tilings_what_the_heuristic_names_is_all_that_is_tried() -> None:
    named: Any = ScriptedProduct([kernel(Tiling(1, 2, 0)), kernel(Tiling(2, 2, 0))], has=TILINGS)
    assert offered(named, ()) == named.suggested()


def test_nothing_is_tried_where_the_first_cuts_the_depth_or_there_is_none() -> None:
    assert tried(kernel(TILINGS[0], cuts_depth=True), kernel(TILINGS[1]), has=TILINGS) == []
    assert tried() == []


class Clock:
    """Of a device whose kernels take what they are told to, and which is asked as torch's is."""

    def __init__(self) -> None:
        self.now = 0.0

    def event(self, enable_timing: bool) -> Mark:
        assert enable_timing
        return Mark(self)


class Mark:
    def __init__(self, clock: Clock) -> None:
        self._clock, self._at = clock, -1.0

    def record(self) -> None:
        self._at = self._clock.now

    def elapsed_time(self, after: Mark) -> float:
        return after._at - self._at


class TimedProduct(ScriptedProduct):
    """Its kernels take `took` milliseconds, and give `numbers` where these are not the first's."""

    def __init__(self, clock: Clock, took: dict[Tiling, float], numbers: dict[Tiling, float]) -> None:
        first = next(iter(took))
        super().__init__([kernel(first)], has=tuple(took))
        self._clock, self._took, self._numbers = clock, took, numbers
        self.matrices: list[int] = []

    def launcher(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, chosen: Kernel) -> Any:
        def launch() -> None:
            if chosen.tiling not in self._took:
                raise VendorError("cublasLtMatmul failed with status 15")
            self._clock.now += self._took[chosen.tiling]
            self.matrices.append(int(w[0, 0]))
            out.fill_(self._numbers.get(chosen.tiling, 1.0))

        return launch


class TimedLibrary:
    def __init__(self, product: TimedProduct) -> None:
        self._product = product

    def product(self, shape: ProductShape) -> Any:
        return self._product


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return clock


def test_the_fastest_is_chosen_of_those_that_give_the_very_numbers_of_the_first(clock: Clock) -> None:
    first, slow, fast, other = TILINGS[:4]
    product = TimedProduct(clock, {first: 4.0, slow: 5.0, fast: 2.0, other: 1.0}, {other: 1.5})
    library: Any = TimedLibrary(product)
    vendor = VendorProducts(library)
    shape = ProductShape(4, 8, 16, torch.bfloat16)
    matrices = [torch.full((8, 16), number, dtype=torch.bfloat16) for number in range(5)]
    assert vendor.choose(shape, matrices)
    assert set(product.matrices) == {0, 1, 2, 3, 4}, "no cache may hold what is timed"
    out, before = torch.zeros(4, 8, dtype=torch.bfloat16), clock.now
    vendor.run(shape, torch.zeros(4, 16, dtype=torch.bfloat16), matrices[0], out)
    assert clock.now - before == 2.0
    assert (out == 1).all()


def test_runs_take_turns_and_a_launch_has_the_median_of_them(clock: Clock) -> None:
    order: list[str] = []

    def launch(name: str, *milliseconds: float) -> Any:
        left = list(milliseconds)

        def run() -> None:
            order.append(name)
            clock.now += left.pop(0)

        return run

    runs = {"one": [launch("one", 1, 9, 2)], "two": [launch("two", 4, 4, 4), launch("two", 6, 6, 6)]}
    assert microseconds(runs, rounds=3) == {"one": 2000, "two": 5000}
    assert order == ["one", "two", "two"] * 3


class RefusingLibrary:
    """It has no heuristic for a product, as on a GPU that does not multiply such numbers."""

    num_asked = 0

    def product(self, shape: ProductShape) -> Any:
        self.num_asked += 1
        raise VendorError("cublasLtMatmulAlgoGetHeuristic failed with status 15")


def test_a_product_that_the_library_refuses_is_left_to_torch_which_the_log_says_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library: Any = RefusingLibrary()
    vendor = VendorProducts(library)
    matrices = [torch.zeros(4096, 4096, dtype=torch.bfloat16)]
    with caplog.at_level(logging.WARNING):
        assert vendor.choose(SHAPE, matrices)
        assert not vendor.choose(SHAPE, matrices), "it was tried before"
    assert not vendor.takes(SHAPE)
    assert library.num_asked == 1
    (record,) = caplog.records
    assert "status 15" in record.getMessage()


def test_shapes_whose_parts_lie_otherwise_are_not_taken_for_one_another() -> None:
    near, far = (replace(SHAPE, parts=2, part_stride=rows * 4096) for rows in (96, 128))
    assert near != far
    assert (near.out_numel, far.out_numel) == (2 * 96 * 4096, (128 + 96) * 4096)
    assert (near.out_dtype, SHAPE.out_dtype) == (torch.float32, torch.bfloat16)
    for wrong in ({"parts": 2, "part_stride": 95 * 4096}, {"parts": 3, "part_stride": 96 * 4096}, {"part_stride": 1}):
        with pytest.raises(AssertionError):
            replace(SHAPE, **wrong)


def test_without_a_gpu_there_is_no_library() -> None:
    assert vendor_products(torch.device("cpu")) is None

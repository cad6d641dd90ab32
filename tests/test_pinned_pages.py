"""Pages that arrays travel through: every array arrives whole, and no page is written while copies still read it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.cuda.pinned_pages import NUM_PAGES, PinnedPages

CPU = torch.device("cpu")


class Watch:
    """Moments that remember what was asked of them, in order, all in one list."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self._made = 0

    def moment(self, device: torch.device) -> Watched:
        self._made += 1
        return Watched(self, self._made - 1)


class Watched:
    def __init__(self, watch: Watch, number: int) -> None:
        self._watch, self._number = watch, number

    def record(self) -> None:
        self._watch.seen.append(("left", self._number))

    def wait(self) -> None:
        self._watch.seen.append(("waited", self._number))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float64])
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 5), (2, 0, 4), (1000,)])
def test_arrays_arrive_whole_whatever_came_before(dtype: type, shape: tuple[int, ...]) -> None:
    pages, draw = PinnedPages(CPU, page_bytes=16_384), np.random.default_rng(0)
    sent, arrived = [], []
    for odd in range(1, 60):
        sent += [draw.integers(0, 100, size=odd).astype(np.uint8), draw.integers(0, 100, size=shape).astype(dtype)]
        arrived += [pages.upload(values) for values in sent[-2:]]
    for values, tensor in zip(sent, arrived, strict=True):
        assert tensor.shape == values.shape
        assert np.array_equal(tensor.numpy(), values)


def test_rows_that_lie_apart_are_brought_together() -> None:
    values = np.arange(40, dtype=np.int64).reshape(8, 5)[::2, 1:3]
    assert np.array_equal(PinnedPages(CPU).upload(values).numpy(), values)


def test_a_page_is_waited_for_before_it_is_written_again() -> None:
    watch = Watch()
    pages = PinnedPages(CPU, page_bytes=512, moment=watch.moment)
    for _ in range(2 * (NUM_PAGES + 1)):  # two arrays a page
        pages.upload(np.zeros(250, np.uint8))
    turns = [(number, (number + 1) % NUM_PAGES) for number in range(NUM_PAGES)]
    assert watch.seen == [event for left, entered in turns for event in (("left", left), ("waited", entered))]


def test_an_array_larger_than_a_page_travels_by_itself() -> None:
    watch = Watch()
    pages = PinnedPages(CPU, page_bytes=512, moment=watch.moment)
    values = np.arange(1000, dtype=np.int32)
    assert np.array_equal(pages.upload(values).numpy(), values)
    assert watch.seen == []

"""How often values fell where: a histogram in plain numbers, for whoever exports it. Knows no units and no names."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Distribution:
    """`counts[i]` values, `sums[i]` together, were at most `bounds[i]` and above the bound before; the last ones, of
    which there is one more than of bounds, were above all bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sums: tuple[float, ...]

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def total(self) -> float:
        return sum(self.sums)


class Histogram:
    """Takes values in. Owner: one thread or event loop; `distribution` is a copy that anyone may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sums = [0.0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        place = bisect_left(self._bounds, value)
        self._counts[place] += times
        self._sums[place] += value * times

    @property
    def distribution(self) -> Distribution:
        return Distribution(self._bounds, tuple(self._counts), tuple(self._sums))

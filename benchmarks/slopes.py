"""How fast a count grows, told from noise: the slope of a series of samples, and the series of a whole service.

The slope is the median of the slopes of all pairs (Theil 1950, Sen 1968): one sample that was taken at a bad moment
changes nothing.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST_POINTS = 6
"""A process that was seen less often says nothing of growth."""


@dataclass(slots=True)
class Series:
    """Samples of one count: minutes since the beginning, and the count."""

    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, minutes: float, count: float) -> None:
        self.points.append((minutes, count))

    def per_minute(self, warm_up_minutes: float = 0.0) -> float | None:
        """Growth a minute, without the first minutes after the first sample; None with too few points."""
        points = [point for point in self.points if point[0] - self.points[0][0] >= warm_up_minutes]
        if len(points) < LEAST_POINTS:
            return None
        pairs = itertools.combinations(points, 2)
        return statistics.median((later - earlier) / (end - begin) for (begin, earlier), (end, later) in pairs)


class Growth:
    """Series by what is counted and by whom it was counted at, such as a process."""

    def __init__(self) -> None:
        self._series: dict[str, dict[str, Series]] = defaultdict(lambda: defaultdict(Series))

    def add(self, minutes: float, counts: Mapping[tuple[str, str], float]) -> None:
        """Take in one sample: counts by (what, where)."""
        for (what, where), count in counts.items():
            self._series[what][where].add(minutes, count)

    def steepest(self, warm_up_minutes: float) -> dict[str, float]:
        """Of each thing counted, the growth a minute where it grows fastest, each place after its own warm-up."""
        found: dict[str, float] = {}
        for what, places in self._series.items():
            slopes = [slope for series in places.values() if (slope := series.per_minute(warm_up_minutes)) is not None]
            if slopes:
                found[what] = max(slopes)
        return found

    def told(self) -> dict[str, dict[str, list[tuple[float, float]]]]:
        """The samples that are judged, for a result file."""
        return {
            what: {
                where: [(round(at, 2), round(count, 2)) for at, count in series.points]
                for where, series in places.items()
                if len(series.points) >= LEAST_POINTS
            }
            for what, places in self._series.items()
        }

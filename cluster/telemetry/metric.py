"""What a metric is, and one value of it: what both outlets read (`cluster.telemetry.metrics_page`,
`cluster.telemetry.ray_metrics`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from worker.distribution import Distribution

PREFIX: Final = "raycomb_"


class Kind(Enum):
    """Prometheus' types. The names of counters, and of no other metric, end in `_total`."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` is Prometheus' own, with the unit in it: seconds, ratio, tokens. `labels` are those beside the labels of
    the process, which every sample has."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric: a number, or the distribution of a histogram. `labels` are values, in the metric's order."""

    metric: Metric
    value: float | Distribution
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Source:
    """Samples of one process, under labels that tell it from others."""

    labels: dict[str, str]
    samples: list[Sample]


def maker(kind: Kind) -> Callable[..., Metric]:
    """A short way to write a catalogue."""

    def make(name: str, help_: str, *labels: str) -> Metric:
        return Metric(PREFIX + name, kind, help_, labels)

    return make


counter = maker(Kind.COUNTER)
gauge = maker(Kind.GAUGE)
histogram = maker(Kind.HISTOGRAM)

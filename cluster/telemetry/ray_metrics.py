"""Hands a process's metrics to Ray, whose agent on every node exports them with the prefix `ray_`.

Ray's instruments cost microseconds a call, so the hot road keeps plain numbers and this brings Ray up to date now and
then: counters by what they grew, histograms by one observation for each value that came, of the mean of its bucket.
Of more values than `MAX_OBSERVATIONS` it tells a share, the same of every bucket: a latency a token would cost Ray more
than the tokens cost the gateway. Quantiles stay what they are, and counts are those of the counters.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final

from ray.util.metrics import Counter, Gauge, Histogram

from cluster.telemetry.metric import Kind, Sample, Source
from worker.distribution import Distribution

logger = logging.getLogger(__name__)

PERIOD_S: Final = 2.0
MAX_CALLS_IN_A_ROW: Final = 256
"""Of Ray, before the event loop has its turn: less than a millisecond."""

MAX_OBSERVATIONS: Final = 250
"""Of one histogram in one period."""

Key = tuple[str, tuple[str, ...]]
Call = Callable[[], None]


class RayMetrics:
    """Owner: a replica's event loop. `read` gives all samples of the process, from sources with labels of one kind."""

    def __init__(self, read: Callable[[], Iterable[Source]]) -> None:
        self._read = read
        self._instruments: dict[str, Counter | Gauge | Histogram] = {}
        self._told: dict[Key, float | Distribution] = {}
        self._owed: dict[Key, list[float]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Bring Ray up to date until `stop`. A fault ends it, and is logged: the service goes on without.

        In a context of its own, since a replica's constructor runs in that of a request of Serve's.
        """
        self._task = asyncio.create_task(self._run(), name="ray metrics", context=contextvars.Context())
        self._task.add_done_callback(_log_fault)

    async def stop(self) -> None:
        """Harmless before `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self.publish()
            await asyncio.sleep(PERIOD_S)

    async def publish(self) -> None:
        """Bring Ray up to date once."""
        num_calls = 0
        for labels, sample in [(source.labels, sample) for source in self._read() for sample in source.samples]:
            for call in self._calls(labels, sample):
                call()
                num_calls += 1
                if num_calls % MAX_CALLS_IN_A_ROW == 0:
                    await asyncio.sleep(0)

    def _calls(self, process: dict[str, str], sample: Sample) -> Iterator[Call]:
        """What must be told to Ray since this sample was last read."""
        metric, value = sample.metric, sample.value
        tags = process | dict(zip(metric.labels, sample.labels, strict=True))
        key = metric.name, (*process.values(), *sample.labels)
        before, self._told[key] = self._told.get(key), value
        match self._instrument(process, sample):
            case Gauge() as gauge:
                assert not isinstance(value, Distribution)
                yield partial(gauge.set, value, tags)
            case Counter() as counter:
                assert not isinstance(value, Distribution)
                assert not isinstance(before, Distribution)
                if growth := value - (before or 0):
                    yield partial(counter.inc, growth, tags)
            case Histogram() as histogram:
                assert isinstance(value, Distribution)
                assert before is None or isinstance(before, Distribution)
                owed = self._owed.setdefault(key, [0.0] * len(value.counts))
                for mean, times in thinned(growth_by_bucket(before, value), owed):
                    observe = partial(histogram.observe, mean, tags)
                    for _ in range(times):
                        yield observe

    def _instrument(self, process: dict[str, str], sample: Sample) -> Counter | Gauge | Histogram:
        metric = sample.metric
        if (known := self._instruments.get(metric.name)) is not None:
            return known
        made: Counter | Gauge | Histogram
        keys = (*process, *metric.labels)
        match metric.kind:
            case Kind.COUNTER:
                made = Counter(metric.name, metric.help, keys)
            case Kind.GAUGE:
                made = Gauge(metric.name, metric.help, keys)
            case Kind.HISTOGRAM:
                assert isinstance(sample.value, Distribution)
                made = Histogram(metric.name, metric.help, list(sample.value.bounds), keys)
        self._instruments[metric.name] = made
        return made


def growth_by_bucket(before: Distribution | None, after: Distribution) -> list[tuple[float, int]]:
    """For each bucket: the mean of what came, kept inside the bucket against rounding, and how often."""
    grown = []
    edges = (0.0, *after.bounds, math.inf)
    for place, (count, total) in enumerate(zip(after.counts, after.sums, strict=True)):
        times = count - (before.counts[place] if before is not None else 0)
        mean = (total - (before.sums[place] if before is not None else 0.0)) / times if times else 0.0
        grown.append((min(max(mean, math.nextafter(edges[place], math.inf)), edges[place + 1]), times))
    return grown


def thinned(grown: list[tuple[float, int]], owed: list[float]) -> list[tuple[float, int]]:
    """The same, with at most `MAX_OBSERVATIONS` in all and one more a bucket. What is left out is `owed`, bucket by
    bucket, so that a rare value is told in its turn, as often as its share says."""
    total = sum(times for _, times in grown)
    if total <= MAX_OBSERVATIONS:
        return grown
    told = []
    for place, (mean, times) in enumerate(grown):
        due = owed[place] + times * MAX_OBSERVATIONS / total
        owed[place] = due - int(due)
        told.append((mean, int(due)))
    return told


def _log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("Ray gets no metrics any more", exc_info=error)

"""The text of a gateway's `/metrics`, in Prometheus' format or OpenMetrics'.

It holds what this gateway counts, under the label `gateway`, and what every worker told it over the data plane, under
the label `worker`. Other gateways count for themselves: where there are several, scrape Ray's agents, which export all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector, CollectorRegistry

from cluster.telemetry.metric import Kind, Metric, Sample, Source
from worker.distribution import Distribution


def exposition(sources: Iterable[Source], metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The page and its content type, for a scraper that sent `accept`.

    `metrics` are told of even where there is no sample. All sources with a sample of one metric have the same labels.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(sources), list(metrics)))
    encode, content_type = choose_encoder(accept)
    page: bytes = encode(registry)
    return page, content_type


class _Collected(Collector):
    """What there is at one moment, as the library wants it."""

    def __init__(self, sources: list[Source], metrics: list[Metric]) -> None:
        self._sources = sources
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        found: dict[str, list[tuple[dict[str, str], Sample]]] = {}
        for source in self._sources:
            for sample in source.samples:
                found.setdefault(sample.metric.name, []).append((source.labels, sample))
        for metric in self._metrics:
            yield _family(metric, found.get(metric.name, []))


def _family(metric: Metric, found: list[tuple[dict[str, str], Sample]]) -> Family:
    names = [*(found[0][0] if found else ()), *metric.labels]
    values = [([*labels.values(), *sample.labels], sample.value) for labels, sample in found]
    match metric.kind:
        case Kind.COUNTER:
            counters = CounterMetricFamily(metric.name, metric.help, labels=names)
            for labels, value in values:
                counters.add_metric(labels, _number(value))
            return counters
        case Kind.GAUGE:
            gauges = GaugeMetricFamily(metric.name, metric.help, labels=names)
            for labels, value in values:
                gauges.add_metric(labels, _number(value))
            return gauges
        case Kind.HISTOGRAM:
            histograms = HistogramMetricFamily(metric.name, metric.help, labels=names)
            for labels, value in values:
                assert isinstance(value, Distribution), f"{metric.name} is a histogram"
                histograms.add_metric(labels, buckets=_buckets(value), sum_value=value.total)
            return histograms


def _number(value: float | Distribution) -> float:
    assert not isinstance(value, Distribution), "only a histogram has a distribution"
    return value


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Cumulative, as the format has them; the last one counts everything."""
    buckets, count = [], 0
    for bound, number in zip((*distribution.bounds, float("inf")), distribution.counts, strict=True):
        count += number
        buckets.append(("+Inf" if bound == float("inf") else str(bound), float(count)))
    return buckets

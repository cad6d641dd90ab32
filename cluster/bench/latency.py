"""What a load measured, made of the times at which tokens came: the figures that users of this field compare by."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, as its client saw it. Times are seconds of one monotonic clock.

    `events` are the times at which news of tokens came; a server may put several tokens into one event, so their
    number is not `num_output`. `error` is None exactly when the whole answer came.
    """

    sent: float
    ended: float
    num_input: int
    num_output: int = 0
    events: tuple[float, ...] = ()
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.events[0] - self.sent

    @property
    def time_per_output_token(self) -> float:
        """Seconds a token after the first; needs at least two tokens."""
        return (self.events[-1] - self.events[0]) / (self.num_output - 1)

    @property
    def inter_token_latencies(self) -> list[float]:
        """Gaps between one event and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.events)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median and 99th percentile of a measure, in milliseconds; all zero where nothing was measured."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of_seconds(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(0.0, 0.0, 0.0)
        ms = np.asarray(values, dtype=np.float64) * 1e3
        return cls(float(ms.mean()), float(np.median(ms)), float(np.percentile(ms, 99)))


@dataclass(frozen=True, slots=True)
class LoadResult:
    """All requests of one run of a load, and how long the run took from the first request to the last answer."""

    records: Sequence[RequestRecord]
    duration_s: float
    max_concurrency: int | None = None

    @property
    def good(self) -> list[RequestRecord]:
        """Those that gave their whole answer."""
        return [record for record in self.records if record.error is None]

    def spreads(self) -> dict[str, Spread]:
        """TTFT, TPOT and ITL of the requests that succeeded."""
        good = self.good
        return {
            "ttft": Spread.of_seconds([r.time_to_first_token for r in good]),
            "tpot": Spread.of_seconds([r.time_per_output_token for r in good if r.num_output > 1]),
            "itl": Spread.of_seconds([gap for r in good for gap in r.inter_token_latencies]),
        }

    def within(self, slo: Mapping[str, float]) -> list[RequestRecord]:
        """Those that gave their whole answer within every limit: milliseconds by `ttft`, `tpot` and `e2el`."""
        return [record for record in self.good if all(_measured_ms(record, name) <= slo[name] for name in slo)]

    def summary(self, slo: Mapping[str, float] | None = None) -> dict[str, float | int | None]:
        """The figures under the names that `vllm bench serve` saves them by."""
        good = self.good
        num_input = sum(r.num_input for r in good)
        num_output = sum(r.num_output for r in good)
        figures: dict[str, float | int | None] = {
            "duration": self.duration_s,
            "completed": len(good),
            "failed": len(self.records) - len(good),
            "max_concurrency": self.max_concurrency,
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": len(good) / self.duration_s,
            "output_throughput": num_output / self.duration_s,
            "total_token_throughput": (num_input + num_output) / self.duration_s,
        }
        if slo:
            figures["request_goodput"] = len(self.within(slo)) / self.duration_s
        for name, spread in self.spreads().items():
            figures |= {
                f"mean_{name}_ms": spread.mean,
                f"median_{name}_ms": spread.median,
                f"p99_{name}_ms": spread.p99,
            }
        return figures


_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
}


def result_block(result: LoadResult, slo: Mapping[str, float] | None = None) -> str:
    """The table for a person, in the layout that users of `vllm bench serve` read."""
    figures = result.summary(slo)
    rows: list[tuple[str, float | int | None]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
        ("Maximum request concurrency:", figures["max_concurrency"]),
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
        ("Request goodput (req/s):", figures.get("request_goodput")),
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    lines = [
        f"{' Serving Benchmark Result ':=^50}",
        *(_row(title, value) for title, value in rows if value is not None),
    ]
    for name, title in _TITLES.items():
        lines.append(f"{title:-^50}")
        for statistic, label in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
            lines.append(_row(f"{label} {name.upper()} (ms):", figures[f"{statistic}_{name}_ms"]))
    return "\n".join([*lines, "=" * 50])


def _measured_ms(record: RequestRecord, name: str) -> float:
    match name:
        case "ttft":
            return record.time_to_first_token * 1e3
        case "tpot":
            return record.time_per_output_token * 1e3 if record.num_output > 1 else 0.0
        case _:
            return (record.ended - record.sent) * 1e3


def _row(title: str, value: float | int | None) -> str:
    return f"{title:<40}{value:<10}" if isinstance(value, int) else f"{title:<40}{value:<10.2f}"

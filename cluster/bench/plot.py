"""A picture of what `raycomb bench online` measured: how long tokens took, and what came out over time.

Needs matplotlib, which only this wants (`pip install "raycomb[plot]"`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from cluster.bench.latency import LoadResult, RequestRecord
from planner.errors import InvalidConfiguration

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES: Final = (".png", ".svg", ".pdf")
MAX_BINS: Final = 120
Floats = npt.NDArray[np.float64]


def check_plot(path: Path, find: Callable[[str], object | None] = importlib.util.find_spec) -> None:
    """Before a load is run for it. `find` says whether a module is installed. Raises `InvalidConfiguration`."""
    if path.suffix not in SUFFIXES:
        raise InvalidConfiguration(f"--plot {path}: a picture's name ends with {', '.join(SUFFIXES)}", param="plot")
    if not path.absolute().parent.is_dir():
        raise InvalidConfiguration(f"--plot {path}: there is no folder {path.parent}", param="plot")
    if find("matplotlib") is None:
        raise InvalidConfiguration(
            '--plot needs matplotlib, which is not installed: pip install "raycomb[plot]"', param="plot"
        )


def draw(result: LoadResult, path: Path, title: str, slo: Mapping[str, float] | None = None) -> None:
    """Write the picture. `slo` are limits in milliseconds, by `ttft` and `tpot`, that are drawn beside the curves.

    Raises `InvalidConfiguration` where no request succeeded, since there is nothing to draw.
    """
    if not result.good:
        raise InvalidConfiguration(f"--plot {path}: no request succeeded, so there is nothing to draw", param="plot")
    from matplotlib.figure import Figure  # the only use of it, and not everybody has it

    limits = slo or {}
    spreads = result.spreads()
    figure = Figure(figsize=(11, 7), layout="constrained")
    (first, between), (tokens, open_) = figure.subplots(2, 2)
    ttft = [record.time_to_first_token for record in result.good]
    _draw_shares(first, ttft, "Time to first token", limits.get("ttft"), spreads["ttft"].p99)
    gaps = [gap for record in result.good for gap in record.inter_token_latencies]
    _draw_shares(between, gaps, "Between two tokens", limits.get("tpot"), spreads["itl"].p99)
    edges = time_bins(result)
    width = edges[1] - edges[0]
    tokens.stairs(tokens_per_bin(result.good, edges) / width, edges, fill=True, color="C1")
    tokens.set(title="Tokens a second", xlabel="seconds from the first request", ylim=(0, None))
    open_.stairs(most_open_per_bin(result.records, edges), edges, fill=True, color="C2")
    open_.set(title="Requests in flight, at most", xlabel="seconds from the first request", ylim=(0, None))
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def time_bins(result: LoadResult) -> Floats:
    """Edges of equal spans that cover the run, in seconds from its first request: about two for each request."""
    start = min(record.sent for record in result.records)
    end = max(record.ended for record in result.records) - start
    num_bins = max(2, min(MAX_BINS, 2 * len(result.records)))
    return np.linspace(0.0, max(end, 1e-3), num_bins + 1)


def tokens_per_bin(records: Sequence[RequestRecord], edges: Floats) -> Floats:
    """Tokens that came within each span; an answer's are spread evenly over its events."""
    start = min(record.sent for record in records)
    times = [at - start for record in records for at in record.events]
    weights = [record.num_output / len(record.events) for record in records for _ in record.events]
    counts, _ = np.histogram(times, edges, weights=weights)
    return counts.astype(np.float64)


def most_open_per_bin(records: Sequence[RequestRecord], edges: Floats) -> Floats:
    """The most requests that were in flight at once within each span."""
    sent = np.sort([record.sent for record in records])
    ended = np.sort([record.ended for record in records])
    moments = np.concatenate([edges[:-1] + sent[0], sent])  # between them it only falls
    num_open = np.searchsorted(sent, moments, "right") - np.searchsorted(ended, moments, "right")
    most = np.zeros(len(edges) - 1)
    spans = np.clip(np.searchsorted(edges, moments - sent[0], "right") - 1, 0, len(most) - 1)
    np.maximum.at(most, spans, num_open)
    return most


def _draw_shares(axes: Axes, seconds: Sequence[float], title: str, limit_ms: float | None, p99_ms: float) -> None:
    """The share of values that is below each: a percentile is read off sideways."""
    milliseconds = np.sort(np.asarray(seconds, dtype=np.float64)) * 1e3
    if len(milliseconds):
        axes.ecdf(milliseconds)
        axes.axvline(p99_ms, color="C0", linestyle=":", label=f"p99 {p99_ms:.1f} ms")
        if milliseconds[0] > 0 and math.log10(milliseconds[-1] / milliseconds[0]) > 1.5:
            axes.set_xscale("log")
    if limit_ms is not None:
        axes.axvline(limit_ms, color="C3", linestyle="--", label=f"limit {limit_ms:g} ms")
    axes.set(title=title, xlabel="milliseconds", ylabel="share below", ylim=(0, 1))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()

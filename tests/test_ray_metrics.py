"""What Ray is told of histograms: what came since the last time, in the bucket where it fell."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.telemetry.ray_metrics import MAX_OBSERVATIONS, growth_by_bucket, thinned
from worker.distribution import Histogram

BOUNDS = (0.01, 0.1, 1.0, 10.0)
values = st.lists(st.sampled_from((0.0, 0.003, 0.01, 0.05, 0.1, 0.7, 1.0, 3.0, 10.0, 55.0)), max_size=30)


def told(grown: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(mean, times) for mean, times in grown if times]


def test_only_what_came_since_is_told() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.05)
    before = histogram.distribution
    histogram.observe(0.25, 2)
    histogram.observe(0.75)
    histogram.observe(20.0)
    assert told(growth_by_bucket(before, histogram.distribution)) == [(1.25 / 3, 3), (20.0, 1)]
    assert told(growth_by_bucket(None, before)) == [(0.05, 1)]
    assert told(growth_by_bucket(before, before)) == []


@given(values, values)
def test_a_histogram_that_is_told_so_has_the_same_buckets_and_nearly_the_same_sum(
    first: list[float], second: list[float]
) -> None:
    """Also where rounding would push a mean over its bucket's bound."""
    origin, copy = Histogram(BOUNDS), Histogram(BOUNDS)
    before = None
    for batch in (first, second):
        for value in batch:
            origin.observe(value)
        for mean, times in growth_by_bucket(before, origin.distribution):
            assert mean > 0
            copy.observe(mean, times)
        before = origin.distribution
    assert copy.distribution.counts == origin.distribution.counts
    assert abs(copy.distribution.total - origin.distribution.total) < 1e-9


def test_of_many_values_a_share_is_told_and_the_rare_ones_in_their_turn() -> None:
    owed = [0.0] * 3
    periods = [thinned([(0.005, 89_990), (0.05, 10_000), (0.5, 10)], owed) for _ in range(80)]
    assert all(sum(times for _, times in period) <= MAX_OBSERVATIONS + 3 for period in periods)
    counts = [sum(period[place][1] for period in periods) for place in range(3)]
    assert counts[0] == pytest.approx(80 * MAX_OBSERVATIONS * 0.8999, abs=1)
    assert counts[1] == pytest.approx(80 * MAX_OBSERVATIONS / 10, abs=1)
    assert counts[2] in (1, 2)  # one in ten thousand


def test_few_values_are_told_as_they_are() -> None:
    owed = [0.0, 0.0]
    grown = [(0.5, MAX_OBSERVATIONS - 100), (2.0, 100)]
    assert thinned(grown, owed) == grown
    assert owed == [0.0, 0.0]

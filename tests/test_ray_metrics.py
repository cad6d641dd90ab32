"""What Ray is told of histograms: what came since the last time, in the bucket where it fell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.ray_metrics import growth_by_bucket
from worker.distribution import Histogram

BOUNDS = (0.01, 0.1, 1.0, 10.0)
values = st.lists(st.sampled_from((0.0, 0.003, 0.01, 0.05, 0.1, 0.7, 1.0, 3.0, 10.0, 55.0)), max_size=30)


def test_only_what_came_since_is_told() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(0.05)
    before = histogram.distribution
    histogram.observe(0.25, 2)
    histogram.observe(0.75)
    histogram.observe(20.0)
    assert growth_by_bucket(before, histogram.distribution) == [(1.25 / 3, 3), (20.0, 1)]
    assert growth_by_bucket(None, before) == [(0.05, 1)]
    assert growth_by_bucket(before, before) == []


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

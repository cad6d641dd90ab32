"""Histograms count where Prometheus would, and totals survive the wire."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.telemetry.worker_metrics import FORCED, SAMPLED, worker_samples
from planner.limits import Snapshot
from planner.metrics import Metrics
from planner.request import FinishReason
from protos import worker_pb2 as pb
from worker.distribution import Distribution, Histogram
from worker.stats import StepKind
from worker.totals import QUEUE_BOUNDS_S, Tally, Totals
from worker.wire_totals import totals_from_proto, totals_to_proto

counts = st.integers(0, 2**63)
distributions = st.builds(
    lambda counts, value: Distribution(QUEUE_BOUNDS_S, tuple(counts), tuple(value * count for count in counts)),
    st.lists(st.integers(0, 2**40), min_size=len(QUEUE_BOUNDS_S) + 1, max_size=len(QUEUE_BOUNDS_S) + 1),
    st.floats(0, 1e6),
)
totals = st.builds(
    Totals,
    prompt_tokens_computed=counts,
    tokens_generated=counts,
    tokens_forced=counts,
    decode_tokens=counts,
    prefill_tokens=counts,
    padded_rows=counts,
    prefill_forwards=counts,
    decode_forwards=st.dictionaries(st.integers(1, 2**32 - 1), counts, max_size=9),
    prefix_queries=counts,
    prefix_hits=counts,
    preemptions=counts,
    cells_swapped_out=counts,
    cells_swapped_in=counts,
    finished=st.dictionaries(st.sampled_from(FinishReason), st.integers(1, 2**63)),
    queue_time=distributions,
    step_time=st.fixed_dictionaries(dict.fromkeys(StepKind, distributions)),
)


def test_a_value_on_a_bound_belongs_below_it_and_one_above_all_is_kept() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    assert histogram.distribution == Distribution((1.0, 2.0), (2, 2, 1), (1.5, 3.5, 7.0))


def test_several_equal_values_are_as_many_single_ones() -> None:
    one, many = Histogram((1.0,)), Histogram((1.0,))
    for _ in range(3):
        one.observe(0.25)
    many.observe(0.25, 3)
    assert one.distribution == many.distribution
    assert (many.distribution.count, many.distribution.total) == (3, 0.75)


def test_a_distribution_does_not_follow_its_histogram() -> None:
    histogram = Histogram((1.0,))
    before = histogram.distribution
    histogram.observe(0.5)
    assert before.count == 0


def test_totals_and_their_metrics_say_what_was_forced_of_all_that_was_drawn() -> None:
    totals = Tally(Metrics(num_tokens_generated=7, num_tokens_forced=3), ()).totals()
    samples = {sample.metric: sample.value for sample in worker_samples(Snapshot(1, 1, 0, 0, 0, 0, 0, 0), totals)}
    assert (samples[SAMPLED], samples[FORCED]) == (7, 3)


@given(totals)
def test_totals_are_the_same_at_the_other_end_of_the_wire(sent: Totals) -> None:
    received = pb.Totals.FromString(totals_to_proto(sent).SerializeToString())
    assert totals_from_proto(received) == sent

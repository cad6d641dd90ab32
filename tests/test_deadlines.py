"""Time in a worker: how fast its queue moves, what it refuses for that, and what runs out of time."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import DeadlineExceeded, DeadlineUnmeetable, QueueFull
from planner.planner import Planner
from planner.request import FinishReason, Request
from tests.data_plane import attached, serving
from tests.engine_bench import holding, running
from tests.fakes import FakeExecutor, fake_info, fake_limits, fake_request
from worker.deadlines import SLACK, Deadlines
from worker.patience import Patience
from worker.queue_rate import LONGEST_RETRY_S, SHORTEST_RETRY_S, QueueRate, retry_after_s


def in_s(seconds: float, num_prompt: int = 3, max_tokens: int = 4, **fields: int | str) -> Request:
    return fake_request(range(1, num_prompt + 1), max_tokens, deadline=time.monotonic() + seconds, **fields)


def rated(rate: QueueRate, tokens_per_s: int) -> None:
    for _ in range(10):
        rate.note_step(tokens_per_s, 1.0, left_some=True)


def test_the_rate_is_that_of_steps_that_could_not_do_all() -> None:
    rate = QueueRate()
    rate.note_step(10, 0.1, left_some=False)
    assert rate.tokens_per_s is None
    for _ in range(6):
        rate.note_step(100, 0.1, left_some=True)
    assert rate.tokens_per_s == pytest.approx(1000)


def test_a_measurement_ends_with_its_queue() -> None:
    rate = QueueRate()
    rated(rate, 5)
    rate.note_step(1, 0.01, left_some=False)
    assert rate.tokens_per_s is None


@pytest.mark.parametrize(("num_tokens", "seconds"), [(100, 0.4), (0, 100.0)])
def test_a_step_or_a_standstill_is_no_rate(num_tokens: int, seconds: float) -> None:
    rate = QueueRate()
    rate.note_step(num_tokens, seconds, left_some=True)
    assert rate.tokens_per_s is None


def test_a_rate_follows_what_happens_now() -> None:
    rate = QueueRate()
    rated(rate, 1000)
    for _ in range(400):
        rate.note_step(10, 0.1, left_some=True)
    assert rate.tokens_per_s == pytest.approx(100, rel=0.1)


@given(st.integers(0, 10**9), st.none() | st.floats(1e-3, 1e6))
def test_advice_to_come_again_stays_within_bounds(num_tokens: int, tokens_per_s: float | None) -> None:
    advice = retry_after_s(num_tokens, tokens_per_s)
    assert SHORTEST_RETRY_S <= advice <= LONGEST_RETRY_S
    if tokens_per_s is not None and SHORTEST_RETRY_S < advice < LONGEST_RETRY_S:
        assert advice == num_tokens / tokens_per_s


def test_deadlines_pass_in_order_and_only_for_what_lives() -> None:
    live = {1, 2, 3, 4}
    deadlines = Deadlines(live)
    for request_id, at in ((1, 30.0), (2, 10.0), (3, 20.0), (4, 99.0)):
        deadlines.add(request_id, at)
    live.remove(3)
    assert deadlines.take_passed(9.9) == []
    assert deadlines.take_passed(30.0) == [2, 1]
    assert deadlines.take_passed(30.0) == []
    assert len(deadlines) == 1


def test_far_deadlines_of_what_has_ended_take_no_room() -> None:
    live: set[int] = set()
    deadlines = Deadlines(live)
    for request_id in range(10_000):
        live.add(request_id)
        deadlines.add(request_id, 1e9 + request_id)
        live.remove(request_id)
    assert len(deadlines) <= SLACK + 1


def test_a_deadline_that_the_queue_cannot_meet_is_refused_with_the_figures() -> None:
    planner = Planner(fake_limits(fake_info()))
    patience = Patience(planner)
    for _ in range(5):
        patience.submit(fake_request(range(1, 201)), now=0.0)
    rated(patience.rate, 100)
    with pytest.raises(DeadlineUnmeetable, match=r"in 9 s, and 1000 tokens .* 100 are done a second: .* 10 s") as told:
        patience.submit(fake_request(deadline=9.0), now=0.0)
    assert told.value.retry_after_s == pytest.approx(10.0)
    assert planner.snapshot().num_waiting == 5
    patience.submit(fake_request(deadline=11.0), now=0.0)
    patience.submit(fake_request(deadline=1.0, tenant="other"), now=0.0)  # its turn comes at once
    patience.submit(fake_request(range(1, 9), deadline=1.0, num_generated=2), now=0.0)  # accepted elsewhere before
    with pytest.raises(DeadlineUnmeetable, match="had passed"):
        patience.submit(fake_request(deadline=1.0), now=1.0)


def test_nothing_is_refused_for_its_deadline_before_anything_was_measured() -> None:
    patience = Patience(Planner(fake_limits(fake_info())))
    for _ in range(50):
        patience.submit(fake_request(range(1, 201), deadline=0.1), now=0.0)


def test_a_full_queue_says_when_it_will_be_through() -> None:
    patience = Patience(Planner(fake_limits(fake_info(), max_waiting=3)))
    for _ in range(3):
        patience.submit(fake_request(range(1, 201)), now=0.0)
    rated(patience.rate, 50)
    with pytest.raises(QueueFull, match="3 requests are waiting") as told:
        patience.submit(fake_request(), now=0.0)
    assert told.value.retry_after_s == pytest.approx(12.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_deadline_ends_every_sequence_once_and_frees_its_cells(depth: int) -> None:
    with running(FakeExecutor(max_steps_in_flight=depth, step_time_s=0.005)) as bench:
        bench.client.submit(1, in_s(0.2, max_tokens=900, n=3))
        bench.client.submit(2, fake_request(max_tokens=60))
        for index in range(3):
            bench.heard.wait_ended(1, index=index)
            (end,) = bench.heard.ends[1, index]
            assert end.finish_reason is FinishReason.FAILED
            assert isinstance(end.error, DeadlineExceeded)
            assert 1 <= len(bench.heard.tokens[1, index]) < 900
        bench.heard.wait_ended(2)
        assert bench.heard.reason(2) is FinishReason.LENGTH
        snapshot = bench.heard.wait_quiet()
        assert snapshot.owned_cells == 0
        assert bench.engine.num_live == 0


def test_a_request_that_runs_out_of_time_in_the_queue_is_never_run() -> None:
    executor = FakeExecutor(step_time_s=0.01)
    with running(executor, max_num_seqs=1) as bench:
        bench.client.submit(1, fake_request([7, 7, 7], 60))
        bench.client.submit(2, in_s(0.1, num_prompt=50))
        bench.heard.wait_ended(2)
        assert isinstance(bench.heard.ends[2, 0][0].error, DeadlineExceeded)
        bench.heard.wait_ended(1)
        assert bench.engine.metrics.num_prompt_tokens_computed == 3
        assert {chunk.num_prompt for step in executor.steps for chunk in step.chunks} == {3}


def test_a_request_that_ends_in_time_hears_nothing_of_its_deadline() -> None:
    with running() as bench:
        bench.client.submit(1, in_s(0.3))
        bench.heard.wait_ended(1)
        time.sleep(0.4)
        bench.client.submit(1, fake_request())
        bench.heard.wait(lambda: len(bench.heard.ends[1, 0]) == 1)
        assert bench.heard.reason(1) is FinishReason.LENGTH


def test_an_engine_measures_its_queue_and_tells_it_in_every_report() -> None:
    with running(FakeExecutor(step_time_s=0.02), max_num_seqs=4, prefix_caching=False) as bench:
        for key in range(60):
            bench.client.submit(key, fake_request(range(1, 101), 1))
        bench.heard.wait(lambda: any(report.snapshot.queue_tokens_per_s for report in bench.heard.reports))
        rate = next(rate for report in bench.heard.reports if (rate := report.snapshot.queue_tokens_per_s))
        assert 0 < rate <= 64 / 0.02 * 1.1  # 64 tokens a step at most
        bench.client.submit(99, in_s(0.2))
        bench.client.submit(98, in_s(5.0, tenant="other"))
        bench.heard.wait_ended(98, 99)
        assert isinstance(bench.heard.refusals[99][0], DeadlineUnmeetable)
        assert bench.heard.reason(98) is FinishReason.LENGTH
        bench.heard.wait_quiet()
        assert bench.heard.snapshot.queue_tokens_per_s is None


async def test_a_deadline_reaches_the_engine_over_the_wire() -> None:
    async with serving(FakeExecutor(step_time_s=0.01)) as served, attached(served.address) as gateway:
        await gateway.submit(1, in_s(0.3, max_tokens=900))
        await gateway.read_ends(1)
        assert isinstance(gateway.ends[1, 0].error, DeadlineExceeded)
        assert gateway.tokens[1, 0]


async def test_a_full_inbox_passes_the_advice_of_the_queue_on() -> None:
    with running(holding(), inbox_size=1, max_num_seqs=1) as bench:
        bench.client.submit(0, fake_request())
        bench.executor.wait_launched(1)
        bench.client.submit(1, fake_request())
        with pytest.raises(QueueFull) as told:
            bench.client.submit(2, fake_request())
        assert told.value.retry_after_s == SHORTEST_RETRY_S

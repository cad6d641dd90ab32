"""The engine's steps, with the real planner and a scripted executor."""

from __future__ import annotations

import pytest

from planner.errors import Unavailable
from planner.request import FinishReason, SamplingParams
from tests.engine_bench import holding, running
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_request
from tests.recorder import Recorder
from worker.engine import EngineState


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_what_an_undisturbed_run_gives(depth: int) -> None:
    seeded = [
        fake_request(range(1, 40 + 7 * key), 20, sampling=SamplingParams(seed=key), stop_token_ids=frozenset({3, 400}))
        for key in range(20)
    ]
    with running(FakeExecutor(max_steps_in_flight=depth)) as bench:
        for key, request in enumerate(seeded):
            bench.client.submit(key, request)
        bench.heard.wait_ended(*range(20))
        for key, request in enumerate(seeded):
            assert bench.heard.tokens[key, 0] == expected_tokens(request)
        assert not bench.heard.refusals


@pytest.mark.parametrize("depth", [1, 2])
def test_the_sequences_of_one_request_all_end(depth: int) -> None:
    request = fake_request(range(1, 40), 10, n=4, sampling=SamplingParams(seed=5))
    with running(FakeExecutor(max_steps_in_flight=depth)) as bench:
        bench.client.submit(1, request)
        for index in range(4):
            bench.heard.wait_ended(1, index=index)
            assert bench.heard.tokens[1, index] == expected_tokens(request, index)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_token_goes_out_before_the_second_is_made(depth: int) -> None:
    with running(holding(depth)) as bench:
        bench.client.submit(1, fake_request(max_tokens=5))
        bench.executor.release(1)
        bench.heard.wait(lambda: len(bench.heard.tokens.get((1, 0), ())) == 1)
        assert bench.engine.stats.num_steps == 1


def test_an_idle_engine_waits_without_turning() -> None:
    with running() as bench:
        bench.client.submit(1, fake_request())
        bench.heard.wait_ended(1)
        turns = len(bench.heard.reports)
        bench.client.submit(2, fake_request())
        bench.heard.wait_ended(2)
        steps = len(bench.executor.steps)
        assert bench.engine.stats.num_steps == steps == 8
        # Connecting, and each step; the submit itself may have been heard of before its first step.
        assert turns <= 1 + 4
        assert len(bench.heard.reports) <= 1 + 8


def test_one_report_a_step_carries_all_sequences() -> None:
    with running(holding()) as bench:
        bench.client.submit(0, fake_request(max_tokens=3))
        bench.executor.wait_launched(1)
        for key in range(1, 10):
            bench.client.submit(key, fake_request(max_tokens=3))
        bench.executor.release()
        bench.heard.wait_ended(*range(10))
        with_updates = [report for report in bench.heard.reports if report.updates]
        assert len(with_updates) == len(bench.executor.steps)
        assert max(len(report.updates) for report in with_updates) >= 9


def test_cells_add_up_in_every_report() -> None:
    with running() as bench:
        for key in range(30):
            bench.client.submit(key, fake_request(range(1, 50), 10, n=2))
        bench.heard.wait_ended(*range(30), index=1)
        bench.heard.wait_quiet()
        for report in bench.heard.reports:
            snapshot = report.snapshot
            assert snapshot.free_cells + snapshot.owned_cells + snapshot.cached_cells == snapshot.capacity
        assert bench.heard.snapshot.owned_cells == 0
        assert bench.engine.snapshot == bench.heard.snapshot


def test_stats_tell_decodes_from_prefills_and_know_when_reports_went_out() -> None:
    with running() as bench:
        bench.client.submit(1, fake_request(range(1, 40), 5))
        bench.heard.wait_ended(1)
        stats = bench.engine.stats
        assert (stats.prefill.count, stats.decode.count, stats.mixed.count) == (1, 4, 0)
        assert stats.emitted_at is not None
        assert stats.emitted_at >= bench.executor.emitted_at[-1]
        assert stats.decode.total_s >= stats.decode.longest_s > 0


def test_totals_are_whole_when_the_engine_is_idle_and_a_new_client_gets_them_first() -> None:
    with running(FakeExecutor(fake_info(widths=(1, 4)))) as bench:
        for key in range(3):
            bench.client.submit(key, fake_request(range(1, 40), 5, stop_token_ids=frozenset()))
        bench.heard.wait_ended(0, 1, 2)
        bench.heard.wait_quiet()
        totals = bench.heard.reports[-1].totals
        assert totals is not None
        assert totals == bench.engine.totals
        assert totals.tokens_generated == 15
        assert totals.finished == {FinishReason.LENGTH: 3}
        assert totals.decode_tokens + totals.prefill_tokens == 39 * 3 - totals.prefix_hits + 4 * 3
        rows = sum(width * count for width, count in totals.decode_forwards.items())
        assert rows - totals.padded_rows == totals.decode_tokens > 0
        assert totals.queue_time.count == 3
        assert sum(distribution.count for distribution in totals.step_time.values()) == bench.engine.stats.num_steps
        later = Recorder()
        bench.engine.connect(later)
        later.wait(lambda: bool(later.reports))
        assert later.reports[0].totals == totals


def test_what_was_cancelled_while_it_waited_has_no_queue_time() -> None:
    with running(holding(), max_num_seqs=1) as bench:
        for key in range(3):
            bench.client.submit(key, fake_request(max_tokens=2))
        bench.executor.wait_launched(1)
        bench.client.cancel(1)
        bench.executor.release()
        bench.heard.wait_ended(0, 1, 2)
        bench.heard.wait_quiet()
        assert bench.engine.totals.queue_time.count == 2
        assert bench.engine.totals.finished == {FinishReason.LENGTH: 2, FinishReason.CANCELLED: 1}


def test_a_look_inside_is_taken_between_two_steps_and_tells_the_last_ones() -> None:
    with running(holding()) as bench:
        bench.client.submit(1, fake_request(range(1, 40), 50))
        bench.executor.release(4)
        bench.executor.wait_launched(5)
        asked = bench.engine.inspect()
        assert not asked.done()
        bench.executor.release(1)
        view = asked.result(10)
        assert [record.step.number for record in view.steps] == [1, 2, 3, 4, 5]
        assert all(record.seconds > 0 for record in view.steps)
        assert view.holds.pool.adds_up
        (sequence,) = view.holds.sequences
        assert (sequence.num_prompt, sequence.num_tokens) == (39, 39 + 5)


def test_a_look_at_an_idle_engine_makes_no_report() -> None:
    with running() as bench:
        bench.client.submit(1, fake_request())
        bench.heard.wait_ended(1)
        bench.heard.wait_quiet()
        num_reports = len(bench.heard.reports)
        assert bench.engine.inspect().result(10).holds.num_sequences == 0
        assert len(bench.heard.reports) == num_reports


def test_a_look_that_nobody_waits_for_any_more_is_not_taken() -> None:
    with running(holding()) as bench:
        bench.client.submit(1, fake_request(max_tokens=3))
        bench.executor.wait_launched(1)
        given_up, wanted = bench.engine.inspect(), bench.engine.inspect()
        assert given_up.cancel()
        bench.executor.release()
        bench.heard.wait_ended(1)
        assert wanted.result(10).holds.pool.adds_up
        assert bench.engine.state is EngineState.RUNNING
        assert not bench.deaths


def test_a_stopped_engine_shows_nothing() -> None:
    with running() as bench:
        bench.engine.stop()
        with pytest.raises(Unavailable):
            bench.engine.inspect()

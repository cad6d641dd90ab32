"""The engine, with the real planner and a scripted executor."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from planner.errors import (
    ContextLengthExceeded,
    ForwardFailed,
    InvalidCheckpoint,
    InvalidConfiguration,
    InvalidRequest,
    QueueFull,
    Unavailable,
    WorkerLost,
)
from planner.limits import Limits
from planner.request import FinishReason, SamplingParams
from planner.step import ChunkOutput
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_limits, fake_request
from tests.recorder import Recorder
from worker.engine import Client, Engine, EngineState, StepReport

FOREVER = 900


@dataclass
class Bench:
    """A running engine with one client, and what its death would leave."""

    engine: Engine
    executor: FakeExecutor
    heard: Recorder
    client: Client
    deaths: list[BaseException]


@contextmanager
def running(executor: FakeExecutor | None = None, *, inbox_size: int = 1000, **limits: Any) -> Iterator[Bench]:
    executor = executor or FakeExecutor()
    wanted = fake_limits(executor.info, max_steps_in_flight=executor.max_steps_in_flight, **limits)
    deaths: list[BaseException] = []
    engine = Engine(executor, wanted, inbox_size=inbox_size, on_death=deaths.append, check_cells=True)
    engine.start()
    heard = Recorder()
    try:
        yield Bench(engine, executor, heard, engine.connect(heard), deaths)
    finally:
        executor.release()
        engine.stop()
        assert executor.closed


def holding(depth: int = 1, **info: Any) -> FakeExecutor:
    executor = FakeExecutor(fake_info(**info), max_steps_in_flight=depth)
    executor.hold()
    return executor


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


def test_a_refusal_is_the_only_news_of_its_key() -> None:
    with running() as bench:
        bench.client.submit(1, fake_request(max_tokens=5000))
        bench.client.submit(2, fake_request([5000]))
        bench.client.submit(3, fake_request())
        bench.heard.wait_ended(1, 2, 3)
        assert [type(refusal) for refusal in bench.heard.refusals[1]] == [ContextLengthExceeded]
        assert [type(refusal) for refusal in bench.heard.refusals[2]] == [InvalidRequest]
        assert set(bench.heard.ends) == {(3, 0)}
        assert bench.engine.num_live == 0


def test_a_key_is_free_again_when_its_end_is_heard() -> None:
    with running() as bench:
        again = threading.Event()

        def listen(report: StepReport) -> None:
            if any(getattr(news, "finish_reason", None) for _, news in report.updates) and not again.is_set():
                again.set()
                other.submit(1, fake_request())

        other = bench.engine.connect(listen)
        other.submit(1, fake_request())
        assert again.wait(10)
        bench.heard.wait(lambda: bench.engine.num_live == 0)


def test_a_key_that_is_live_cannot_be_submitted_again() -> None:
    with running(holding()) as bench:
        bench.client.submit(1, fake_request())
        with pytest.raises(InvalidRequest, match="1 is already running"):
            bench.client.submit(1, fake_request())
        bench.executor.release()
        bench.heard.wait_ended(1)
        assert bench.heard.tokens[1, 0] == expected_tokens(fake_request())


def test_two_clients_may_use_the_same_key() -> None:
    with running() as bench:
        other = Recorder()
        second = bench.engine.connect(other)
        bench.client.submit(1, fake_request([1]))
        second.submit(1, fake_request([2]))
        bench.heard.wait_ended(1)
        other.wait_ended(1)
        assert bench.heard.tokens[1, 0] == expected_tokens(fake_request([1]))
        assert other.tokens[1, 0] == expected_tokens(fake_request([2]))


def test_a_full_inbox_refuses_and_a_cancel_still_gets_in() -> None:
    with running(holding(), inbox_size=2) as bench:
        bench.client.submit(0, fake_request(max_tokens=FOREVER))
        bench.executor.wait_launched(1)
        bench.client.submit(1, fake_request())
        bench.client.submit(2, fake_request())
        with pytest.raises(QueueFull, match="holds 2 requests"):
            bench.client.submit(3, fake_request())
        bench.client.cancel(0)
        bench.executor.release()
        bench.heard.wait_ended(0, 1, 2)
        assert bench.heard.reason(0) is FinishReason.CANCELLED
        bench.client.submit(3, fake_request())
        bench.heard.wait_ended(3)
        assert bench.heard.reason(3) is FinishReason.LENGTH


def test_a_full_planner_refuses_in_a_report() -> None:
    with running(holding(), max_waiting=2) as bench:
        bench.client.submit(0, fake_request(max_tokens=FOREVER))
        bench.executor.wait_launched(1)
        for key in range(1, 6):
            bench.client.submit(key, fake_request())
        bench.executor.release()
        bench.heard.wait(lambda: len(bench.heard.refusals) == 3)
        assert all(type(refusal) is QueueFull for (refusal,) in bench.heard.refusals.values())
        bench.client.cancel(0)
        bench.heard.wait_ended(0, 1, 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancel_frees_the_cells_within_a_step(depth: int) -> None:
    with running(holding(depth)) as bench:
        bench.client.submit(1, fake_request(range(1, 30), FOREVER))
        bench.executor.release(3)
        bench.executor.wait_launched(3 + depth)
        bench.client.cancel(1)
        launched = len(bench.executor.steps)
        bench.executor.release()
        bench.heard.wait_ended(1)
        snapshot = bench.heard.wait_quiet()
        bench.heard.wait(lambda: bench.heard.snapshot.owned_cells == 0)
        assert bench.heard.reason(1) is FinishReason.CANCELLED
        assert len(bench.executor.steps) == launched
        assert snapshot.capacity == bench.heard.snapshot.free_cells + bench.heard.snapshot.cached_cells


def test_a_cancel_that_comes_with_its_submit_is_not_lost() -> None:
    with running(holding()) as bench:
        bench.client.submit(0, fake_request(max_tokens=50))
        bench.executor.wait_launched(1)
        bench.client.submit(1, fake_request(max_tokens=FOREVER))
        bench.client.cancel(1)
        bench.client.cancel(1)
        bench.executor.release()
        bench.heard.wait_ended(0, 1)
        assert bench.heard.reason(1) is FinishReason.CANCELLED
        assert bench.heard.tokens[1, 0] == ()
        bench.client.cancel(1)
        bench.client.cancel(77)
        bench.client.submit(2, fake_request())
        bench.heard.wait_ended(2)


def test_a_cancel_may_name_some_sequences_of_a_request() -> None:
    with running(holding()) as bench:
        bench.client.submit(1, fake_request(max_tokens=20, n=3))
        bench.executor.release(4)
        bench.executor.wait_launched(5)
        bench.client.cancel(1, [0])
        bench.client.cancel(1, [2])
        bench.executor.release()
        bench.heard.wait_ended(1, index=1)
        bench.heard.wait_quiet()
        reasons = [bench.heard.reason(1, index) for index in range(3)]
        assert reasons == [FinishReason.CANCELLED, FinishReason.LENGTH, FinishReason.CANCELLED]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_storm_of_cancels_leaves_nothing_behind(depth: int) -> None:
    chance = random.Random(depth)
    executor = FakeExecutor(fake_info(num_cells=600), step_time_s=0.0002, max_steps_in_flight=depth)
    with running(executor) as bench:
        others = [bench.client]
        recorders = [bench.heard]
        for _ in range(2):
            recorders.append(Recorder())
            others.append(bench.engine.connect(recorders[-1]))

        def storm(number: int) -> None:
            luck = random.Random(number)
            for key in range(number, 300, 3):
                others[number].submit(key, fake_request(range(1, luck.randrange(2, 60)), 30, n=luck.choice([1, 1, 3])))
                if luck.random() < 0.8:
                    others[number].cancel(luck.randrange(number, key + 1, 3), luck.choice([None, [0], [1, 2]]))

        threads = [threading.Thread(target=storm, args=(number,)) for number in chance.sample(range(3), 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        bench.heard.wait(lambda: bench.engine.num_live == 0, timeout_s=60)
        snapshot = bench.heard.wait_quiet()
        assert snapshot.owned_cells == 0
        assert snapshot.free_cells + snapshot.cached_cells == snapshot.capacity
        assert not bench.deaths
        for number, recorder in enumerate(recorders):
            assert {key for key, _ in recorder.ends} == set(range(number, 300, 3))
            assert all(len(ends) == 1 for ends in recorder.ends.values())
        reasons = [reason for recorder in recorders for reason in recorder.reasons()]
        assert set(reasons) == {FinishReason.LENGTH, FinishReason.CANCELLED}


def test_closing_a_client_cancels_all_of_its_sequences_and_no_others() -> None:
    with running(holding()) as bench:
        other = Recorder()
        second = bench.engine.connect(other)
        for key in range(5):
            second.submit(key, fake_request(max_tokens=FOREVER))
        bench.client.submit(1, fake_request(max_tokens=30))
        bench.executor.release(4)
        bench.executor.wait_launched(5)
        second.submit(9, fake_request())
        second.close()
        second.close()
        heard = len(other.reports)
        with pytest.raises(Unavailable, match="closed"):
            second.submit(10, fake_request())
        bench.executor.release()
        bench.heard.wait_ended(1)
        assert bench.heard.tokens[1, 0] == expected_tokens(fake_request(max_tokens=30))
        assert bench.heard.wait_quiet().owned_cells == 0
        assert len(other.reports) <= heard + 1
        assert max(len(step.chunks) for step in bench.executor.steps[6:]) == 1


def test_a_listener_that_raises_loses_only_its_own_client(caplog: pytest.LogCaptureFixture) -> None:
    with running(holding()) as bench:

        def broken(report: StepReport) -> None:
            if report.updates:
                raise RuntimeError("this listener is broken")

        second = bench.engine.connect(broken)
        second.submit(1, fake_request(max_tokens=FOREVER))
        bench.client.submit(1, fake_request(max_tokens=30))
        bench.executor.release()
        bench.heard.wait_ended(1)
        assert bench.heard.tokens[1, 0] == expected_tokens(fake_request(max_tokens=30))
        bench.heard.wait_quiet()
        assert bench.heard.snapshot.owned_cells == 0
        assert bench.engine.state is EngineState.RUNNING
        with pytest.raises(Unavailable):
            second.submit(2, fake_request())
    assert "a listener raised" in caplog.text


def test_a_failed_forward_ends_only_the_sequences_it_held() -> None:
    executor = holding()
    executor.fail_forward(2, lambda chunk: chunk.start + chunk.length >= 22)
    with running(executor) as bench:
        bench.client.submit(1, fake_request(range(1, 21), 10))
        bench.client.submit(2, fake_request([1, 2, 3], 10))
        executor.release()
        bench.heard.wait_ended(1, 2)
        assert bench.heard.reason(1) is FinishReason.FAILED
        assert isinstance(bench.heard.ends[1, 0][0].error, ForwardFailed)
        assert bench.heard.tokens[2, 0] == expected_tokens(fake_request([1, 2, 3], 10))
        assert bench.heard.wait_quiet().owned_cells == 0
        assert not bench.deaths


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dead_executor_fails_every_sequence_once_and_is_told_once(
    depth: int, caplog: pytest.LogCaptureFixture
) -> None:
    executor = holding(depth)
    death = RuntimeError("the device is gone")
    executor.die(5, death)
    with running(executor) as bench:
        for key in range(10):
            bench.client.submit(key, fake_request(max_tokens=FOREVER, n=2))
        executor.release(5)
        executor.wait_launched(5 + depth)
        bench.client.submit(50, fake_request())
        late = Recorder()
        bench.engine.connect(late).submit(1, fake_request())
        executor.release()
        bench.heard.wait_ended(*range(10))
        bench.engine.stop()
        assert [type(refusal) for refusal in late.refusals[1]] == [Unavailable]
        assert bench.deaths == [death]
        assert bench.engine.state is EngineState.DEAD
        assert set(bench.heard.ends) == {(key, index) for key in range(10) for index in range(2)}
        assert set(bench.heard.reasons()) == {FinishReason.FAILED}
        assert all(isinstance(end.error, WorkerLost) for (end,) in bench.heard.ends.values())
        assert [type(refusal) for refusal in bench.heard.refusals[50]] == [Unavailable]
        assert bench.engine.num_live == 0
        with pytest.raises(Unavailable, match="died"):
            bench.client.submit(60, fake_request())
        with pytest.raises(Unavailable, match="died"):
            bench.engine.connect(bench.heard)
    assert "the device is gone" in caplog.text


@pytest.mark.parametrize(
    "wrong",
    [lambda outcomes: outcomes[:-1], lambda outcomes: [ChunkOutput(token=None) for _ in outcomes]],
    ids=["one outcome is missing", "no token where one was asked for"],
)
def test_an_executor_that_answers_wrongly_does_not_make_wrong_tokens(
    wrong: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    executor = FakeExecutor()
    executor.answer_wrongly(2, wrong)
    with running(executor) as bench:
        bench.client.submit(1, fake_request(max_tokens=10))
        bench.heard.wait_ended(1)
        assert bench.heard.reason(1) is FinishReason.FAILED
        assert bench.heard.tokens[1, 0] == expected_tokens(fake_request(max_tokens=2))


def test_draining_refuses_new_requests_and_finishes_the_others() -> None:
    with running(holding()) as bench:
        bench.client.submit(1, fake_request(max_tokens=20))
        bench.executor.wait_launched(1)
        heard = len(bench.heard.reports)
        bench.engine.drain()
        assert bench.engine.state is EngineState.DRAINING
        with pytest.raises(Unavailable, match="draining"):
            bench.client.submit(2, fake_request())
        with pytest.raises(Unavailable, match="draining"):
            bench.engine.connect(bench.heard)
        bench.executor.release()
        bench.heard.wait_ended(1)
        assert bench.heard.tokens[1, 0] == expected_tokens(fake_request(max_tokens=20))
        assert len(bench.heard.reports) > heard


def test_an_idle_client_hears_that_the_worker_drains() -> None:
    with running() as bench:
        bench.heard.wait(lambda: len(bench.heard.reports) == 1)
        bench.engine.drain()
        bench.heard.wait(lambda: len(bench.heard.reports) == 2)


def test_stopping_cancels_what_runs_and_what_waits() -> None:
    with running(holding(), max_num_seqs=2) as bench:
        for key in range(6):
            bench.client.submit(key, fake_request(max_tokens=FOREVER))
        bench.executor.release(3)
        bench.executor.wait_launched(4)
        stopping = threading.Thread(target=bench.engine.stop)
        stopping.start()
        bench.executor.release()
        stopping.join(10)
        assert bench.executor.closed
        assert bench.engine.state is EngineState.STOPPED
        ended = {key for key, _ in bench.heard.ends} | set(bench.heard.refusals)
        assert ended == set(range(6))
        assert set(bench.heard.reasons()) == {FinishReason.CANCELLED}
        assert bench.heard.snapshot.owned_cells == 0
        assert not bench.deaths
        with pytest.raises(Unavailable, match="stopped"):
            bench.client.submit(7, fake_request())


def test_an_engine_can_be_stopped_from_its_own_listener() -> None:
    with running() as bench:
        second = bench.engine.connect(lambda report: bench.engine.stop() if report.updates else None)
        second.submit(1, fake_request(max_tokens=FOREVER))
        bench.engine.stop()
        assert bench.engine.state is EngineState.STOPPED


def test_executor_and_limits_are_made_on_the_engine_thread() -> None:
    threads: list[str] = []

    def make_executor() -> FakeExecutor:
        threads.append(threading.current_thread().name)
        return FakeExecutor(fake_info(num_cells=777))

    engine = Engine(make_executor, fake_limits, inbox_size=4, on_death=lambda _: None)
    assert engine.start().num_cells == 777
    assert engine.state is EngineState.RUNNING
    assert engine.snapshot.capacity == 777
    engine.stop()
    assert threads == ["engine"]


def test_what_the_making_of_the_executor_raises_comes_out_of_start() -> None:
    def make_executor() -> FakeExecutor:
        raise InvalidCheckpoint("the checkpoint is cut short")

    deaths: list[BaseException] = []
    engine = Engine(make_executor, fake_limits, inbox_size=4, on_death=deaths.append)
    with pytest.raises(InvalidCheckpoint, match="cut short"):
        engine.start()
    assert engine.state is EngineState.STOPPED
    with pytest.raises(Unavailable):
        engine.connect(Recorder())
    engine.stop()
    assert not deaths


def test_limits_deeper_than_the_executor_are_refused_and_the_executor_is_closed() -> None:
    executor = FakeExecutor(max_steps_in_flight=1)

    def deep(info: Any) -> Limits:
        return replace(fake_limits(info), max_steps_in_flight=2)

    engine = Engine(executor, deep, inbox_size=4, on_death=lambda _: None)
    with pytest.raises(InvalidConfiguration, match="2 steps in flight"):
        engine.start()
    assert executor.closed


def test_stats_tell_decodes_from_prefills_and_know_when_reports_went_out() -> None:
    with running() as bench:
        bench.client.submit(1, fake_request(range(1, 40), 5))
        bench.heard.wait_ended(1)
        stats = bench.engine.stats
        assert (stats.prefill.count, stats.decode.count, stats.mixed.count) == (1, 4, 0)
        assert stats.emitted_at is not None
        assert stats.emitted_at >= bench.executor.emitted_at[-1]
        assert stats.decode.total_s >= stats.decode.longest_s > 0

"""How an engine begins and ends, and what goes wrong on the way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from planner.errors import (
    ForwardFailed,
    InvalidCheckpoint,
    InvalidConfiguration,
    Unavailable,
    WorkerLost,
)
from planner.limits import Limits
from planner.request import Adapter, FinishReason
from planner.step import ChunkOutput
from tests.engine_bench import FOREVER, holding, running
from tests.fake_slots import save_fake_adapter
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_limits, fake_request
from tests.recorder import Recorder
from worker.client import StepReport
from worker.engine import Engine, EngineState


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


def test_whoever_asked_a_dying_engine_something_is_told_that_no_answer_comes(tmp_path: Path) -> None:
    executor = holding()
    executor.give_slots(1)
    executor.die(0, RuntimeError("the device is gone"))
    with running(executor) as bench:
        bench.client.submit(1, fake_request())
        executor.wait_launched(1)
        look = bench.engine.inspect()
        order = bench.engine.load_adapter("pirate", save_fake_adapter(tmp_path / "pirate", 5))
        given_up = bench.engine.inspect()
        assert given_up.cancel()
        executor.release()
        for question in (look, order):
            with pytest.raises(Unavailable, match="died"):
                question.result(10)
        bench.engine.stop()
        assert bench.engine.state is EngineState.DEAD


def test_an_order_that_the_engine_dies_of_is_answered(tmp_path: Path) -> None:
    executor = FakeExecutor(num_slots=1)
    assert executor.adapters is not None
    executor.adapters.held[0] = Adapter("squatter", 1)  # so the executor fails where the engine counts on a free slot
    with running(executor) as bench:
        order = bench.engine.load_adapter("pirate", save_fake_adapter(tmp_path / "pirate", 5))
        with pytest.raises(Unavailable, match="died"):
            order.result(10)


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


def test_the_engine_thread_is_the_only_thread_of_an_engine() -> None:
    before = threading.active_count()
    engine = Engine(FakeExecutor(), fake_limits, inbox_size=4, on_death=lambda _: None)
    engine.start()
    assert threading.active_count() == before + 1
    engine.stop()
    assert threading.active_count() == before

"""Clients of the engine: their keys, refusals and cancels."""

from __future__ import annotations

import random
import threading

import pytest

from planner.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    QueueFull,
    Unavailable,
)
from planner.request import FinishReason
from tests.engine_bench import FOREVER, holding, running
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_request
from tests.recorder import Recorder
from worker.client import StepReport


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

"""Workers are asked what they hold: who is silent is named, and any number of askers costs the workers one question."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from ray.exceptions import RayActorError

from cluster.telemetry.roll_call import RollCaller
from cluster.web.debug_views import RollCall
from planner.errors import Unavailable
from tests.http_desk import until


class Workers:
    """As Serve's handle: gives these answers, once they may come."""

    def __init__(self, *answers: Any) -> None:
        self.answers = answers
        self.asked: list[int] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def broadcast(self, num_steps: int) -> Workers:
        self.asked.append(num_steps)
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert return_exceptions
        assert self.may_answer.wait(timeout_s)
        if isinstance(self.answers[0], TimeoutError):
            raise self.answers[0]
        return list(self.answers)

    def caller(self, *expected: str) -> RollCaller:
        return RollCaller(self.broadcast, lambda: expected)


async def test_who_hangs_or_is_gone_is_named_and_the_others_are_heard() -> None:
    workers = Workers({"worker": "w1"}, TimeoutError(), RayActorError(), {"worker": "new"})
    assert await workers.caller("w3", "w2", "w1").call(0) == RollCall(
        [{"worker": "w1"}, {"worker": "new"}], ["w2", "w3"]
    )


async def test_where_not_even_the_question_gets_through_it_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="TimeoutError"):
        await Workers(TimeoutError()).caller("w1").call(0)


async def test_a_hundred_askers_cost_one_question_and_one_that_leaves_does_not_take_it_along() -> None:
    workers = Workers({"worker": "w1"})
    workers.may_answer.clear()
    caller = workers.caller("w1")
    askers = [asyncio.create_task(caller.call(3)) for _ in range(100)]
    other = asyncio.create_task(caller.call(4))
    await until(lambda: bool(workers.asked))
    askers[0].cancel()
    await asyncio.sleep(0)
    workers.may_answer.set()
    told = await asyncio.gather(*askers, other, return_exceptions=True)
    assert isinstance(told[0], asyncio.CancelledError)
    assert told[1:] == [RollCall([{"worker": "w1"}], [])] * 100
    assert workers.asked == [3, 4]
    await caller.call(3)
    assert workers.asked == [3, 4, 3]

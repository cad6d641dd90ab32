"""New requests while the last worker has left and the one that follows it is still to come, in virtual time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from cluster.routing.failover import Failover, FailoverLimits
from cluster.routing.generation import RemoteGeneration
from cluster.routing.run import Run
from cluster.routing.succession import Succession
from planner.errors import DeadlineExceeded, QueueFull, RequestRefused, Unavailable
from planner.request import FinishReason, Request
from tests.virtual_time import in_virtual_time

PATIENCE_S = 60.0


class Fleet:
    """A gateway's failover, and workers that take runs from the moment on at which they are there."""

    def __init__(self, *, max_held: int = 100) -> None:
        self.started: list[Run] = []
        self.why_not: RequestRefused | None = Unavailable("no worker takes requests now")
        self.succession = Succession(PATIENCE_S)
        limits = FailoverLimits(timeout_s=PATIENCE_S, max_held=max_held)
        self.failover = Failover(self._start, limits, self.succession, lambda: self.succession.is_due)

    def begin(self, deadline: float | None = None) -> RemoteGeneration:
        generation = RemoteGeneration(1, Request(prompt=np.arange(3), max_tokens=4, deadline=deadline))
        self.failover.begin(generation.first_run)
        return generation

    async def follows_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.why_not = None
        await asyncio.sleep(0.1)

    def _start(self, run: Run) -> None:
        if self.why_not is not None:
            raise self.why_not
        self.started.append(run)


@pytest.mark.parametrize("load_s", [0.1, 10, 20, 59])
@in_virtual_time
async def test_a_request_waits_for_the_worker_that_follows_however_slow_the_machine(load_s: float) -> None:
    fleet = Fleet()
    fleet.succession.begin()
    early = fleet.begin()
    await asyncio.sleep(load_s / 2)
    late = fleet.begin()
    await fleet.follows_after(load_s / 2)
    assert fleet.started == [early.first_run, late.first_run]
    assert fleet.failover.num_waiting == 0


@in_virtual_time
async def test_a_refusal_that_is_the_first_word_of_a_drain_is_not_the_last_for_the_request() -> None:
    fleet = Fleet()
    fleet.why_not = None
    generation = fleet.begin()
    fleet.why_not = Unavailable("no worker takes requests now")
    fleet.failover.refused(generation.first_run, "old", Unavailable("the worker is draining"))
    assert fleet.failover.num_waiting == 1
    await fleet.follows_after(20)
    assert fleet.started == [generation.first_run] * 2


@in_virtual_time
async def test_a_worker_that_refuses_for_ever_does_not_hold_a_request_for_ever() -> None:
    fleet = Fleet()
    fleet.why_not = None
    generation = fleet.begin()
    begun_at = asyncio.get_running_loop().time()
    while not generation.over:
        if fleet.started:
            fleet.failover.refused(fleet.started.pop(), "old", Unavailable("the worker is draining"))
        fleet.why_not = None if fleet.why_not else Unavailable("no worker takes requests now")
        await asyncio.sleep(1)
    assert asyncio.get_running_loop().time() - begun_at == pytest.approx(PATIENCE_S, abs=2)
    with pytest.raises(Unavailable):
        await generation.next()


@in_virtual_time
async def test_where_no_worker_comes_all_are_refused_when_patience_with_it_ends() -> None:
    fleet = Fleet()
    fleet.succession.begin()
    early = fleet.begin()
    await asyncio.sleep(PATIENCE_S - 1)
    late = fleet.begin()
    assert not early.over
    await asyncio.sleep(1.1)
    for generation in (early, late, fleet.begin()):
        with pytest.raises(Unavailable, match="no worker takes requests now"):
            await generation.next()


@in_virtual_time
async def test_where_the_service_ends_whoever_waits_is_refused_at_once_and_so_is_whoever_comes() -> None:
    fleet = Fleet()
    fleet.succession.begin()
    waiting = fleet.begin()
    await asyncio.sleep(1)
    fleet.succession.possible = False
    fleet.failover.look_again()
    fleet.failover.refused(fleet.begin().first_run, "old", Unavailable("the worker is draining"))
    for generation in (waiting, fleet.begin()):
        with pytest.raises(Unavailable):
            await generation.next()
    assert asyncio.get_running_loop().time() == pytest.approx(1)


@in_virtual_time
async def test_a_request_waits_for_no_worker_where_none_has_left() -> None:
    with pytest.raises(Unavailable):
        await Fleet().begin().next()


@in_virtual_time
async def test_a_deadline_ends_the_wait_for_a_worker() -> None:
    fleet = Fleet()
    fleet.succession.begin()
    generation = fleet.begin(deadline=time.monotonic())
    await asyncio.sleep(0.1)
    (update,) = await generation.next()
    assert update.finish_reason is FinishReason.FAILED
    assert isinstance(update.error, DeadlineExceeded)


@in_virtual_time
async def test_only_so_many_requests_wait_for_a_worker() -> None:
    fleet = Fleet(max_held=2)
    fleet.succession.begin()
    first, second, third = (fleet.begin() for _ in range(3))
    with pytest.raises(Unavailable):
        await third.next()
    await fleet.follows_after(10)
    assert fleet.started == [first.first_run, second.first_run]


@in_virtual_time
async def test_one_that_finds_the_new_worker_full_is_told_so() -> None:
    fleet = Fleet()
    fleet.succession.begin()
    generation = fleet.begin()
    await asyncio.sleep(10)
    fleet.why_not = QueueFull("every worker's queue is full", retry_after_s=2.0)
    with pytest.raises(QueueFull):
        await generation.next()

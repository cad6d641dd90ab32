"""Requests that wait at one worker while another has room move there; what has begun stays, and nothing is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from cluster.routing.backlog import Backlog
from cluster.routing.failover import Failover, FailoverLimits
from cluster.routing.generation import RemoteGeneration
from cluster.routing.membership import Member
from cluster.routing.rebalance import Rebalancer
from cluster.routing.router import Router
from cluster.routing.run import Run
from cluster.routing.streams import Streams
from cluster.routing.succession import Succession
from cluster.telemetry.gateway_meter import GatewayMeter
from planner.errors import QueueFull, WorkerLost
from planner.limits import Snapshot
from planner.request import FinishReason, Request
from tests.data_plane import SECRET, serving
from tests.fakes import FakeExecutor, expected_tokens, fake_request
from tests.scripted_worker import until
from tests.test_router import info

STEP_TIME_S = 0.003
PATIENCE_S = 20.0


async def answer_of(generation: RemoteGeneration, n: int) -> dict[int, tuple[int, ...]]:
    """All tokens by index; each index must end once, at its budget."""
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(range(n), ())
    ends: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(ends) < n:
            for update in await generation.next():
                tokens[update.index] += update.tokens
                if update.finish_reason is not None:
                    assert update.finish_reason is FinishReason.LENGTH
                    ends.append(update.index)
    assert sorted(ends) == list(range(n))
    return tokens


async def test_what_waits_moves_to_a_worker_that_comes_and_every_answer_is_right() -> None:
    meter = GatewayMeter()
    streams = Streams("served", SECRET, Router(max_waiting=100), meter=meter)
    slow = FakeExecutor(step_time_s=STEP_TIME_S)
    asked = [fake_request([key, 2, 3], 150, n=1 + key % 2) for key in range(9)]
    async with serving(slow, worker_id="a", max_num_seqs=2) as first, serving(worker_id="b", max_num_seqs=4) as second:
        try:
            streams.set_members({"a": Member("a", first.address)})
            await until(lambda: streams.ready)
            answers = asyncio.gather(*(answer_of(streams.submit(request), request.n) for request in asked))
            await until(lambda: first.engine.snapshot.num_running == 2)
            streams.set_members({"a": Member("a", first.address), "b": Member("b", second.address)})
            for request, tokens in zip(asked, await answers, strict=True):
                assert tokens == {index: expected_tokens(request, index) for index in range(request.n)}
            assert streams.num_live == 0
            assert second.engine.metrics.num_requests_submitted >= 5
            assert meter.num_failovers == 0
            assert any("asked back" in event.text for event in meter.events.all)
        finally:
            await streams.close()
    assert len(first.executor.prepared) + len(second.executor.prepared) >= len(asked)


async def test_what_waits_at_a_worker_that_is_taken_away_goes_to_another_and_what_runs_ends_there() -> None:
    streams = Streams("served", SECRET, Router(max_waiting=100))
    slow = FakeExecutor(step_time_s=STEP_TIME_S)
    asked = [fake_request([key, 2, 3], 100) for key in range(6)]
    async with serving(slow, worker_id="a", max_num_seqs=2) as first, serving(worker_id="b", max_num_seqs=4) as second:
        try:
            streams.set_members({"a": Member("a", first.address)})
            await until(lambda: streams.ready)
            answers = asyncio.gather(*(answer_of(streams.submit(request), request.n) for request in asked))
            await until(lambda: first.engine.snapshot.num_running == 2)
            streams.set_members({"a": Member("a", first.address), "b": Member("b", second.address)})
            await until(lambda: len(streams._router.infos) == 2)
            streams.set_members({"b": Member("b", second.address)})
            assert [tokens[0] for tokens in await answers] == [expected_tokens(request) for request in asked]
            assert second.engine.metrics.num_requests_submitted >= 4
            assert first.engine.metrics.finished[FinishReason.LENGTH] == 2
        finally:
            await streams.close()


@dataclass
class FakeGiver:
    backlog: Backlog = field(default_factory=Backlog)
    recalled: list[int] = field(default_factory=list)

    def recall(self, count: int) -> int:
        self.recalled += self.backlog.recall(count)
        return count


def crowded(num_waiting: int, num_own: int, num_free: int) -> tuple[Rebalancer, FakeGiver]:
    """Worker a is full and has a queue, of which the newest are this gateway's; b has some seats free."""
    router = Router(max_waiting=100)
    base = Snapshot(1000, 1000, 0, 0, num_running=0, num_waiting=0, queued_prefill_tokens=0, step=1)
    for worker_id, state in (
        ("a", replace(base, num_running=8, num_waiting=num_waiting)),
        ("b", replace(base, num_running=8 - num_free)),
    ):
        router.join(info(worker_id))
        router.observe(worker_id, state, draining=False, newest_request=0)
    giver = FakeGiver()
    for request_id in range(1, num_own + 1):
        giver.backlog.sent(request_id)
    return Rebalancer(router, {"a": giver, "b": FakeGiver()}, GatewayMeter()), giver


def test_the_newest_are_asked_back_and_as_many_as_there_is_room_for() -> None:
    rebalancer, giver = crowded(num_waiting=6, num_own=6, num_free=2)
    rebalancer.look()
    assert giver.recalled == [6, 5]
    rebalancer.look()
    assert giver.recalled == [6, 5], "they are on their way"
    giver.backlog.heard_of(6)  # it had begun
    rebalancer.look()
    assert giver.recalled == [6, 5, 4]


def test_each_gateway_asks_for_its_part_of_the_queue() -> None:
    rebalancer, giver = crowded(num_waiting=8, num_own=2, num_free=4)
    rebalancer.look()
    assert giver.recalled == [2]


def test_a_gateway_that_has_nothing_there_asks_for_nothing() -> None:
    rebalancer, giver = crowded(num_waiting=8, num_own=0, num_free=4)
    rebalancer.look()
    assert giver.recalled == []


async def test_a_request_that_was_taken_back_is_never_refused_but_waits_for_room() -> None:
    started: list[Run] = []
    is_full = True

    def start(run: Run) -> None:
        if is_full:
            raise QueueFull("the queues of all 2 workers are full")
        started.append(run)

    failover = Failover(start, FailoverLimits(), Succession(60.0), expects_worker=lambda: False)
    generation = RemoteGeneration(1, Request(prompt=np.arange(3), max_tokens=4))
    failover.recalled(generation.first_run)
    await asyncio.sleep(0.1)
    assert failover.num_waiting == 1
    is_full = False
    await until(lambda: started == [generation.first_run])
    assert failover.num_waiting == 0
    failover.refused(started[0], "a", QueueFull("full again"))
    assert failover.num_waiting == 1
    failover.close()
    (update,) = await generation.next()
    assert isinstance(update.error, WorkerLost)

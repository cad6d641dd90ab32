"""A worker that works through a long step is told from one that hangs."""

from __future__ import annotations

import asyncio
import contextlib

from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from tests.data_plane import SECRET, attached, holding, serving
from tests.fakes import FakeExecutor, expected_tokens, fake_request
from tests.scripted_worker import until
from worker.pulse import LOOK_S, Pulse, PulseWatch

STALL_S = 2.5 * LOOK_S


def test_an_engine_without_beats_is_quiet_for_as_long_as_it_is_looked_at() -> None:
    watch = PulseWatch(0.0)
    busy = Pulse(7, idle=False)
    assert watch.look(busy, 1.0)
    assert [watch.look(busy, now) for now in (2.0, 3.0)] == [False, False]
    assert watch.quiet_s == 2.0
    assert watch.look(Pulse(8, idle=False), 4.0)
    assert watch.quiet_s == 0.0


def test_an_idle_engine_is_never_quiet() -> None:
    watch = PulseWatch(0.0)
    assert all(watch.look(Pulse(7, idle=True), now) for now in range(100))
    assert watch.quiet_s == 0.0


def test_a_process_that_was_frozen_does_not_take_its_engine_for_hung() -> None:
    watch = PulseWatch(0.0)
    watch.look(Pulse(7, idle=False), 1.0)
    watch.look(Pulse(7, idle=False), 3600.0)
    assert watch.quiet_s == 2 * LOOK_S


async def beating(executor: FakeExecutor) -> None:
    while True:
        executor.beat()
        await asyncio.sleep(LOOK_S / 4)


async def test_a_step_far_longer_than_the_stall_timeout_loses_nothing_while_it_gets_on() -> None:
    limits = FailoverLimits(stall_timeout_s=STALL_S, max_failovers=0)
    async with serving(holding()) as worker:
        streams = Streams("served", SECRET, Router(max_waiting=100), limits)
        try:
            streams.set_members({"worker-1": Member("worker-1", worker.address)})
            await until(lambda: streams.ready)
            request = fake_request(max_tokens=3)
            generation = streams.submit(request)
            alive = asyncio.create_task(beating(worker.executor))
            await asyncio.sleep(STALL_S + 2 * LOOK_S)
            assert worker.server.engine_quiet_s < STALL_S
            alive.cancel()
            worker.executor.release()
            tokens: tuple[int, ...] = ()
            while len(tokens) < 3:
                (update,) = await generation.next()
                assert update.error is None
                tokens += update.tokens
            assert tokens == expected_tokens(request)
        finally:
            await streams.close()


async def test_a_hung_step_is_quiet_and_its_gateway_hears_nothing() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request())
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        messages = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(3.5 * LOOK_S):
                while True:
                    messages += not (await gateway.read()).beside_engine
        assert messages <= 2  # the greeting, and a beat for the turn that launched the step
        assert worker.server.engine_quiet_s >= 2 * LOOK_S

"""What a gateway makes of the membership of one model's workers, over real gRPC, where none of them is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from opentelemetry.trace import NoOpTracer

from cluster.config import ServiceConfig, service_config
from cluster.gateway_model import GatewayModel
from cluster.routing.generation import RemoteGeneration
from cluster.routing.membership import Member, board, board_key
from planner.errors import Unavailable
from planner.request import FinishReason
from tests.scripted_worker import SECRET, ScriptedWorker, request, tokens, until
from tests.tiny_text import tiny_text

PATIENCE_S = 30.0  # far longer than any of this takes


@dataclass
class Handle:
    """Of the workers' deployment: the board's key, and nothing else that is asked for here."""

    app_name: str = "raycomb"
    deployment_name: str = "Worker"


def config() -> ServiceConfig:
    return service_config({"engine": {"model": "tiny"}, "secret": SECRET, "failover_timeout_s": PATIENCE_S})


def publish(*members: Member) -> None:
    board().publish(board_key(Handle.app_name, Handle.deployment_name), {each.worker_id: each for each in members})


@asynccontextmanager
async def gateway_of(*members: Member) -> AsyncIterator[GatewayModel]:
    publish(*members)
    model = GatewayModel(config(), cast(Any, Handle()), tiny_text(), "gateway", None, NoOpTracer(), None, None)
    try:
        await model.take_over()
        yield model
    finally:
        await model.close()


async def member_of(worker: ScriptedWorker) -> Member:
    return replace(await worker.start(), program=config().program)


async def answered(worker: ScriptedWorker, generation: RemoteGeneration) -> bool:
    """Whether it is sent to the worker, which ends it."""
    submit = (await worker.heard()).submit
    worker.say(tokens(6, finish=FinishReason.STOP), request_id=submit.request_id)
    return [update.tokens for update in await generation.next()] == [(6,)]


async def refused(generation: RemoteGeneration) -> None:
    with pytest.raises(Unavailable):
        await asyncio.wait_for(generation.next(), PATIENCE_S / 10)


async def test_in_a_redeploy_whose_only_worker_leaves_first_old_and_new_gateways_have_requests_wait() -> None:
    old, new = ScriptedWorker("a"), ScriptedWorker("b")
    async with gateway_of(await member_of(old)) as before:
        publish()
        async with gateway_of() as after:
            generations = [each.streams.submit(request()) for each in (before, after)]
            await asyncio.sleep(0.2)
            publish(await member_of(new))
            await until(lambda: new.commands.qsize() == 2)
            assert new.attached == 2
            assert not any(generation.over for generation in generations)
    await old.stop()
    await new.stop()


async def test_where_whoever_ends_the_service_says_so_who_waits_is_refused_at_once_and_who_comes() -> None:
    worker = ScriptedWorker()
    async with gateway_of(await member_of(worker)) as gateway:
        publish()
        await until(lambda: not gateway.streams.ready)
        waiting = gateway.streams.submit(request())
        gateway.drain()
        await refused(waiting)
        with pytest.raises(Unavailable):
            gateway.streams.submit(request())
    await worker.stop()


async def test_where_serve_deletes_the_application_who_waits_is_refused_at_once_and_what_runs_goes_on() -> None:
    worker = ScriptedWorker()
    async with gateway_of(await member_of(worker)) as gateway:
        runs = gateway.streams.submit(request())
        await until(lambda: worker.commands.qsize() == 1)
        publish()
        await until(lambda: not gateway.streams.ready)
        waiting = gateway.streams.submit(request())
        gateway.set_deployed(False)
        await refused(waiting)
        assert await answered(worker, runs)
    await worker.stop()


async def test_where_only_workers_of_another_model_are_there_nobody_is_waited_for() -> None:
    old, other = ScriptedWorker("a"), ScriptedWorker("b")
    member = await member_of(old)
    async with gateway_of(member) as gateway:
        publish()
        await until(lambda: not gateway.streams.ready)
        waiting = gateway.streams.submit(request())
        publish(replace(await other.start(), program="another model"))
        await refused(waiting)
        publish(member)  # it is deployed again as it was
        await until(lambda: gateway.streams.ready)
        assert await answered(old, gateway.streams.submit(request()))
    await old.stop()
    await other.stop()

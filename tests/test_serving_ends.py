"""How streams begin and end: secrets, broken and silent gateways, drain and stop."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from planner.errors import Unavailable
from planner.request import FinishReason, SamplingParams
from tests.data_plane import FOREVER, PATIENCE_S, SECRET, attached, holding, serving, wire_that_goes_silent
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_request
from tests.recorder import Recorder
from worker.serving import DataPlaneServer
from worker.wire import SERVER_OPTIONS


@pytest.mark.parametrize("secret", [None, "", "wrong", SECRET + "!", SECRET[:-1]])
async def test_a_stream_without_the_secret_is_not_let_in(secret: str | None) -> None:
    async with serving() as worker, attached(worker.address, secret) as gateway:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await gateway.read()
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert SECRET not in str(refusal.value.details())


async def test_the_first_message_says_who_the_worker_is() -> None:
    executor = FakeExecutor(fake_info(num_cells=512, context=256))
    async with serving(executor) as worker, attached(worker.address) as gateway:
        message = await gateway.read()
        assert not message.updates
        assert not message.HasField("snapshot")
        info = message.info
        assert (info.worker_id, info.model, info.num_cells, info.context) == ("worker-1", "fake", 512, 256)
        assert (info.vocab_size, info.max_num_seqs, info.device, info.dtype) == (1000, 16, "cpu", "float32")
        assert (info.max_prefill_tokens, info.min_prefill_tokens) == (64, 2)
        message = await gateway.read()
        assert message.snapshot.free_cells == 512
        assert not message.HasField("info")


async def test_a_broken_stream_cancels_everything_within_a_step() -> None:
    async with serving(holding()) as worker, attached(worker.address) as other:
        async with attached(worker.address) as gateway:
            for key in range(1, 6):
                await gateway.submit(key, fake_request(range(1, 20), FOREVER))
            worker.executor.release(3)
            while gateway.snapshot is None or gateway.snapshot.step < 3:
                await gateway.read()
        async with asyncio.timeout(PATIENCE_S):
            # The step is held, so nothing tells that the close waits in the inbox.
            while worker.engine.num_live:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        launched = len(worker.executor.steps)
        worker.executor.release()
        while other.snapshot is None or other.snapshot.num_running or other.snapshot.owned_cells:
            await other.read()
        assert len(worker.executor.steps) == launched
        assert other.snapshot.free_cells + other.snapshot.cached_cells == other.snapshot.capacity


async def test_a_gateway_that_falls_silent_is_given_up() -> None:
    """The connection stays open and nothing comes through it, as when the gateway's process is frozen."""
    impatient = dict(SERVER_OPTIONS) | {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 200,
        "grpc.http2.ping_timeout_ms": 200,
    }
    async with (
        serving(FakeExecutor(step_time_s=0.05), options=tuple(impatient.items())) as worker,
        wire_that_goes_silent(worker.address) as (address, silent),
        attached(address) as gateway,
    ):
        watcher = Recorder()
        worker.engine.connect(watcher)
        await gateway.submit(1, fake_request(max_tokens=FOREVER))
        while (1, 0) not in gateway.tokens:
            await gateway.read()
        silent.set()
        snapshot = await asyncio.to_thread(watcher.wait_quiet)
        assert snapshot.owned_cells == 0
        assert snapshot.step < FOREVER


async def test_half_closing_a_stream_ends_it_and_cancels_everything() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=FOREVER))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        await gateway.call.done_writing()
        await gateway.read_to_the_end()
        assert await gateway.call.code() is grpc.StatusCode.OK
        assert worker.engine.num_live == 0


async def test_draining_refuses_new_requests_tells_the_gateway_and_waits_for_the_others() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=20))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        assert not await worker.server.drain(timeout_s=0.01)
        await gateway.submit(2, fake_request())
        await gateway.read_ends(2)
        assert type(gateway.refusals[2]) is Unavailable
        assert gateway.draining  # though the engine is in the midst of a step
        draining = asyncio.create_task(worker.server.drain(timeout_s=PATIENCE_S))
        worker.executor.release()
        await gateway.read_ends(1)
        assert await draining
        assert gateway.draining
        assert gateway.tokens[1, 0] == expected_tokens(fake_request(max_tokens=20))
        async with attached(worker.address) as late:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await late.read()
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_stopping_sends_the_last_news_before_the_stream_ends() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=FOREVER))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        worker.executor.release()
        await asyncio.to_thread(worker.engine.stop)
        stopping = asyncio.create_task(worker.server.stop(grace_s=PATIENCE_S))
        await gateway.read_to_the_end()
        await stopping
        assert gateway.ends[1, 0].finish_reason is FinishReason.CANCELLED
        assert gateway.snapshot is not None
        assert gateway.snapshot.owned_cells == 0


async def test_a_gateway_that_never_reads_cannot_hold_up_the_end() -> None:
    request = fake_request(range(1, 4), 200, sampling=SamplingParams(logprobs=20))
    async with serving() as worker, attached(worker.address, options=(("grpc.http2.bdp_probe", 0),)) as gateway:
        watcher = Recorder()
        worker.engine.connect(watcher)
        for key in range(16):
            await gateway.submit(key, request)
        await asyncio.to_thread(watcher.wait, lambda: bool(watcher.reports) and watcher.snapshot.step >= 200)
        await asyncio.to_thread(watcher.wait_quiet)
        assert not await worker.server.drain(timeout_s=0.01)
        async with asyncio.timeout(PATIENCE_S):
            await worker.server.stop(grace_s=0.05)
        assert worker.engine.num_live == 0


async def test_a_port_that_is_taken_is_an_error() -> None:
    async with serving() as worker:
        port = int(worker.address.rpartition(":")[2])
        second = DataPlaneServer(worker.engine, worker.executor.info, "worker-2", SECRET, 16, "127.0.0.1", port)
        with pytest.raises(RuntimeError, match=str(port)):
            await second.start()

"""The worker's end of the data plane, over real gRPC in one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from planner.errors import ContextLengthExceeded, InvalidRequest, QueueFull, RequestRefused, Unavailable
from planner.limits import Snapshot
from planner.request import FinishReason, Request, SamplingParams, TokenLogprobs, Update
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_limits, fake_request
from tests.recorder import Recorder
from worker import wire
from worker.engine import Engine, StepReport
from worker.outbox import MAX_UNREAD_ENDS, Outbox, merged
from worker.serving import SERVER_OPTIONS, DataPlaneServer

SECRET = "a secret of this test"
FOREVER = 900
PATIENCE_S = 20.0


@dataclass
class Worker:
    engine: Engine
    executor: FakeExecutor
    server: DataPlaneServer
    address: str


@asynccontextmanager
async def serving(
    executor: FakeExecutor | None = None,
    *,
    inbox_size: int = 1000,
    options: Sequence[tuple[str, int]] = SERVER_OPTIONS,
    **limits: Any,
) -> AsyncIterator[Worker]:
    executor = executor or FakeExecutor()
    engine = Engine(
        executor, fake_limits(executor.info, **limits), inbox_size=inbox_size, on_death=_no_death, check_cells=True
    )
    info = engine.start()
    server = DataPlaneServer(engine, info, "worker-1", SECRET, 16, "127.0.0.1", options=options)
    try:
        yield Worker(engine, executor, server, await server.start())
    finally:
        executor.release()
        await asyncio.to_thread(engine.stop)
        await server.stop(grace_s=1.0)


def _no_death(error: BaseException) -> None:
    raise AssertionError("the engine died") from error


@dataclass
class Gateway:
    """The other end of one stream: what a gateway sees of it."""

    call: Any
    tokens: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    ends: dict[tuple[int, int], Update] = field(default_factory=dict)
    refusals: dict[int, RequestRefused] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    draining: bool = False
    messages: list[pb.StepUpdates] = field(default_factory=list)

    async def read(self) -> pb.StepUpdates:
        message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        if not isinstance(message, pb.StepUpdates):
            raise EOFError(await self.call.code())
        self.messages.append(message)
        if message.HasField("snapshot"):
            self.snapshot = wire.snapshot_from_proto(message.snapshot)
            self.draining = message.snapshot.draining
        for sequence in message.updates:
            news = wire.update_from_proto(sequence)
            if isinstance(news, RequestRefused):
                self.refusals[sequence.request_id] = news
                continue
            place = news.request_id, news.index
            assert place not in self.ends, f"news of {place} after its end"
            self.tokens[place] = self.tokens.get(place, ()) + news.tokens
            if news.finish_reason is not None:
                self.ends[place] = news
        return message

    async def read_to_the_end(self) -> None:
        with pytest.raises(EOFError):
            await self.read_ends(*range(2**16))

    async def submit(self, request_id: int, request: Request) -> None:
        await self.call.write(pb.Command(submit=wire.request_to_proto(request_id, request)))

    async def cancel(self, request_id: int, *indices: int) -> None:
        await self.call.write(pb.Command(cancel=pb.Cancel(request_id=request_id, indices=indices)))

    async def read_ends(self, *request_ids: int, index: int = 0) -> None:
        while not all((key, index) in self.ends or key in self.refusals for key in request_ids):
            await self.read()


@asynccontextmanager
async def attached(
    address: str, secret: str | None = SECRET, options: tuple[tuple[str, int], ...] = ()
) -> AsyncIterator[Gateway]:
    async with grpc.aio.insecure_channel(address, options=(*wire.CHANNEL_OPTIONS, *options)) as channel:
        metadata = () if secret is None else ((wire.SECRET_METADATA, secret),)
        call = worker_pb2_grpc.WorkerStub(channel).Attach(metadata=metadata)
        try:
            yield Gateway(call)
        finally:
            call.cancel()


@asynccontextmanager
async def wire_that_goes_silent(address: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """An address that leads to `address`, and an event after which nothing comes through any more."""
    silent, over = asyncio.Event(), asyncio.Event()
    host, _, port = address.rpartition(":")

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (data := await reader.read(2**16)) and not silent.is_set():
            writer.write(data)
        await over.wait()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        async with asyncio.TaskGroup() as both:
            both.create_task(forward(reader, onward_writer))
            both.create_task(forward(onward_reader, writer))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as proxy:
        try:
            yield "{}:{}".format(*proxy.sockets[0].getsockname()), silent
        finally:
            over.set()


def holding() -> FakeExecutor:
    executor = FakeExecutor()
    executor.hold()
    return executor


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


async def test_tokens_come_in_order_and_end_once() -> None:
    async with serving() as worker, attached(worker.address) as gateway:
        requests = {key: fake_request(range(1, 10 + key), 12, n=1 + key % 2) for key in range(1, 20)}
        for key, request in requests.items():
            await gateway.submit(key, request)
        for key, request in requests.items():
            for index in range(request.n):
                await gateway.read_ends(key, index=index)
                assert gateway.tokens[key, index] == expected_tokens(request, index)
                assert gateway.ends[key, index].finish_reason is FinishReason.LENGTH
        assert worker.engine.num_live == 0


async def test_the_first_token_arrives_while_the_second_is_made() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=5))
        worker.executor.release(1)
        while (1, 0) not in gateway.tokens:
            await gateway.read()
        assert len(gateway.tokens[1, 0]) == 1
        assert worker.engine.stats.num_steps == 1


async def test_one_message_a_step_carries_all_sequences() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(0, fake_request(max_tokens=FOREVER))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        for key in range(1, 8):
            await gateway.submit(key, fake_request(max_tokens=FOREVER))
        # A refusal is written by the same reader, so the submits before it are in the inbox.
        await gateway.submit(0, fake_request())
        while 0 not in gateway.refusals:
            await gateway.read()
        for step in range(2, 7):
            before = len(gateway.messages)
            worker.executor.release(1)
            await asyncio.to_thread(worker.executor.wait_launched, step)
            while gateway.snapshot is None or gateway.snapshot.step < step - 1:
                await gateway.read()
            news = [message for message in gateway.messages[before:] if message.updates]
            assert len(news) == 1
            if step > 2:
                assert sorted(update.request_id for update in news[0].updates) == list(range(8))
                assert all(len(update.tokens) == 1 for update in news[0].updates)


async def test_a_slow_reader_gets_merged_updates_and_misses_nothing() -> None:
    request = fake_request(range(1, 4), 400, sampling=SamplingParams(logprobs=20))
    small_window = (("grpc.http2.bdp_probe", 0),)
    async with serving() as worker, attached(worker.address, options=small_window) as gateway:
        watcher = Recorder()
        worker.engine.connect(watcher)
        for key in range(1, 9):
            await gateway.submit(key, request)
        await gateway.read()
        await asyncio.to_thread(watcher.wait, lambda: watcher.snapshot.step >= 400)
        await asyncio.to_thread(watcher.wait_quiet)
        await gateway.read_ends(*range(1, 9))
        assert all(gateway.tokens[key, 0] == expected_tokens(request) for key in range(1, 9))
        assert len(gateway.messages) < 300
        longest = max(len(update.tokens) for message in gateway.messages for update in message.updates)
        assert longest > 100


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


async def test_a_cancel_ends_a_request_or_some_of_its_sequences() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=20, n=3))
        await gateway.submit(2, fake_request(max_tokens=FOREVER))
        await gateway.cancel(2)
        await gateway.cancel(2)
        await gateway.cancel(1, 0, 2)
        await gateway.cancel(77)
        await gateway.submit(2, fake_request())
        while 2 not in gateway.refusals:
            await gateway.read()
        worker.executor.release()
        del gateway.refusals[2]
        for index in range(3):
            await gateway.read_ends(1, index=index)
        await gateway.read_ends(2)
        assert gateway.ends[2, 0].finish_reason is FinishReason.CANCELLED
        assert [gateway.ends[1, index].finish_reason for index in range(3)] == [
            FinishReason.CANCELLED,
            FinishReason.LENGTH,
            FinishReason.CANCELLED,
        ]


async def test_refusals_are_typed_and_the_stream_goes_on() -> None:
    async with serving() as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=5000))
        await gateway.submit(2, fake_request([7777]))
        await gateway.call.write(pb.Command(submit=pb.Submit(request_id=3)))
        await gateway.call.write(pb.Command())
        await gateway.submit(4, fake_request())
        await gateway.read_ends(1, 2, 3, 4)
        assert type(gateway.refusals[1]) is ContextLengthExceeded
        assert type(gateway.refusals[2]) is InvalidRequest
        assert type(gateway.refusals[3]) is InvalidRequest
        assert gateway.refusals[3].param == "sampling"
        assert gateway.tokens[4, 0] == expected_tokens(fake_request())


async def test_a_prompt_over_the_transports_own_limit_is_refused_by_the_planner() -> None:
    async with serving() as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request([999] * 3_000_000))
        await gateway.read_ends(1)
        assert type(gateway.refusals[1]) is ContextLengthExceeded


async def test_a_request_id_in_use_is_refused_and_may_be_used_after_its_end() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request())
        await gateway.submit(1, fake_request())
        while 1 not in gateway.refusals:
            await gateway.read()
        assert "already running" in gateway.refusals.pop(1).message
        worker.executor.release()
        await gateway.read_ends(1)
        assert gateway.tokens.pop((1, 0)) == expected_tokens(fake_request())
        del gateway.ends[1, 0]
        await gateway.submit(1, fake_request())
        await gateway.read_ends(1)
        assert gateway.tokens[1, 0] == expected_tokens(fake_request())


async def test_a_full_inbox_is_a_refusal_that_says_when_to_come_back() -> None:
    async with serving(holding(), inbox_size=1) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request())
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        await gateway.submit(2, fake_request())
        await gateway.submit(3, fake_request())
        await gateway.read_ends(3)
        refusal = gateway.refusals[3]
        assert isinstance(refusal, QueueFull)
        assert refusal.retry_after_s > 0


async def test_draining_refuses_new_requests_tells_the_gateway_and_waits_for_the_others() -> None:
    async with serving(holding()) as worker, attached(worker.address) as gateway:
        await gateway.submit(1, fake_request(max_tokens=20))
        await asyncio.to_thread(worker.executor.wait_launched, 1)
        assert not await worker.server.drain(timeout_s=0.01)
        await gateway.submit(2, fake_request())
        await gateway.read_ends(2)
        assert type(gateway.refusals[2]) is Unavailable
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
        await asyncio.to_thread(watcher.wait, lambda: watcher.snapshot.step >= 200)
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


async def test_many_gateways_share_a_worker() -> None:
    async with serving() as worker:

        async def one(number: int) -> None:
            async with attached(worker.address) as gateway:
                for key in range(10):
                    await gateway.submit(key, fake_request([number + 1], 10))
                await gateway.read_ends(*range(10))
                assert all(
                    gateway.tokens[key, 0] == expected_tokens(fake_request([number + 1], 10)) for key in range(10)
                )

        await asyncio.gather(*(one(number) for number in range(4)))


def test_merged_updates_are_the_two_in_order() -> None:
    before = Update(1, 0, (5, 6), (TokenLogprobs(5, -1.0),), (TokenLogprobs(1, None),), num_cached_tokens=3)
    after = Update(1, 0, (7,), (TokenLogprobs(7, -2.0),), (TokenLogprobs(2, -1.0),), 0, FinishReason.STOP)
    both = merged(before, after)
    assert both.tokens == (5, 6, 7)
    assert [entry.token for entry in both.logprobs] == [5, 7]
    assert [entry.token for entry in both.prompt_logprobs] == [1, 2]
    assert both.num_cached_tokens == 3
    assert both.finish_reason is FinishReason.STOP


async def test_what_waits_in_an_outbox_is_bounded_by_sequences_not_by_steps() -> None:
    outbox = Outbox()
    outbox.open(1, 1)
    snapshot = Snapshot(10, 10, 0, 0, 0, 0, 0, 0)
    for step in range(500):
        outbox.add(StepReport(((1, Update(9, 0, (step,))),), snapshot), draining=False)
    message = await outbox.next()
    assert message is not None
    assert len(message.updates) == 1
    assert list(message.updates[0].tokens) == list(range(500))
    outbox.finish()
    assert await outbox.next() is None


async def test_a_gateway_that_does_not_read_its_refusals_is_not_read_from() -> None:
    outbox = Outbox()
    for key in range(MAX_UNREAD_ENDS + 1):
        outbox.refuse(key, Unavailable("no"))
    waiting = asyncio.create_task(outbox.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    message = await outbox.next()
    assert message is not None
    assert len(message.updates) == MAX_UNREAD_ENDS + 1
    await asyncio.wait_for(waiting, PATIENCE_S)


def test_the_engine_thread_is_the_only_thread_of_an_engine() -> None:
    before = threading.active_count()
    engine = Engine(FakeExecutor(), fake_limits, inbox_size=4, on_death=_no_death)
    engine.start()
    assert threading.active_count() == before + 1
    engine.stop()
    assert threading.active_count() == before

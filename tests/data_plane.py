"""Both ends of the data plane for tests: a worker with a scripted executor, and what a gateway sees of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.trace import Tracer

from planner.errors import RequestRefused
from planner.limits import Snapshot
from planner.request import Request, Update
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from tests.fakes import FakeExecutor, fake_limits
from worker import wire
from worker.engine import Engine
from worker.serving import DataPlaneServer
from worker.wire import SERVER_OPTIONS

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
    credentials: grpc.ServerCredentials | None = None,
    worker_id: str = "worker-1",
    tracer: Tracer | None = None,
    **limits: Any,
) -> AsyncIterator[Worker]:
    executor = executor or FakeExecutor()
    engine = Engine(
        executor,
        fake_limits(executor.info, **limits),
        inbox_size=inbox_size,
        on_death=_no_death,
        check_cells=True,
        tracer=tracer,
    )
    info = engine.start()
    seats = limits.get("max_num_seqs", 16)
    server = DataPlaneServer(
        engine, info, worker_id, SECRET, seats, "127.0.0.1", options=options, credentials=credentials
    )
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
    newest_request: int = 0
    draining: bool = False
    messages: list[pb.StepUpdates] = field(default_factory=list)

    async def read(self) -> pb.StepUpdates:
        message = await asyncio.wait_for(self.call.read(), PATIENCE_S)
        if not isinstance(message, pb.StepUpdates):
            raise EOFError(await self.call.code())
        self.messages.append(message)
        if not message.HasField("info"):
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the stream is ending: read on
                await self.call.write(pb.Command(read=pb.Read(num_messages=len(self.messages) - 1)))
        if message.HasField("snapshot"):
            self.snapshot = wire.snapshot_from_proto(message.snapshot)
            self.draining = message.snapshot.draining
            self.newest_request = message.snapshot.newest_request
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

    async def recall(self, request_id: int) -> None:
        await self.call.write(pb.Command(recall=pb.Recall(request_id=request_id)))

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

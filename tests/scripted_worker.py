"""A worker that is scripted by hand at the far end of a gateway's real gRPC stream, and a gateway's fleet of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import numpy as np

from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from cluster.telemetry.gateway_meter import GatewayMeter
from planner.errors import RequestRefused
from planner.request import FinishReason, Request, Update
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc as pb_grpc
from worker.wire import SECRET_METADATA, write_update

SECRET = "s3cret"


class ScriptedWorker(pb_grpc.WorkerServicer):
    """A worker that answers nothing by itself: `commands` is what it was sent, `say` what it sends."""

    def __init__(self, worker_id: str = "w0", *, name: str | None = None, context: int = 512) -> None:
        self.worker_id = worker_id
        self.info = pb.WorkerInfo(
            worker_id=name or worker_id,
            model="m",
            vocab_size=100,
            context=context,
            num_cells=1000,
            max_prefill_tokens=64,
            max_num_seqs=8,
        )
        self.commands: asyncio.Queue[pb.Command] = asyncio.Queue()
        self.num_read = 0
        self.attached = 0
        self.num_streams = 0  # that were ever opened
        self._out: asyncio.Queue[pb.StepUpdates | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def Attach(  # noqa: N802 - the protocol's name
        self, request_iterator: AsyncIterator[pb.Command], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StepUpdates]:
        if (SECRET_METADATA, SECRET) not in (context.invocation_metadata() or ()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong secret")
        self.attached += 1
        self.num_streams += 1
        yield pb.StepUpdates(info=self.info)

        async def read() -> None:
            async for command in request_iterator:
                if command.WhichOneof("command") == "read":
                    self.num_read = command.read.num_messages
                else:
                    self.commands.put_nowait(command)

        reader = asyncio.create_task(read())
        try:
            while (message := await self._out.get()) is not None:
                yield message
        finally:
            self.attached -= 1
            reader.cancel()

    async def start(self) -> Member:
        self._server = grpc.aio.server()
        pb_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        return Member(self.worker_id, f"127.0.0.1:{self.port}")

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def say(self, *updates: Update | RequestRefused, request_id: int = 1, snapshot: pb.Snapshot | None = None) -> None:
        message = pb.StepUpdates(snapshot=snapshot)
        for update in updates:
            write_update(message.updates.add(), request_id, update)
        self._out.put_nowait(message)

    def say_totals(self, totals: pb.Totals, snapshot: pb.Snapshot) -> None:
        self._out.put_nowait(pb.StepUpdates(totals=totals, snapshot=snapshot))

    def say_blocks(self, blocks: pb.Blocks) -> None:
        self._out.put_nowait(pb.StepUpdates(blocks=blocks))

    def hang_up(self) -> None:
        self._out.put_nowait(None)

    async def heard(self) -> pb.Command:
        return await asyncio.wait_for(self.commands.get(), 10)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is in code that has no event for it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def fleet_of(
    *workers: ScriptedWorker,
    secret: str = SECRET,
    wait: bool = True,
    limits: FailoverLimits | None = None,
    meter: GatewayMeter | None = None,
    credentials: grpc.ChannelCredentials | None = None,
) -> AsyncIterator[Streams]:
    streams = Streams("served", secret, Router(max_waiting=16), limits, meter, credentials)
    members = {worker.worker_id: await worker.start() for worker in workers}
    streams.set_members(members)
    try:
        if wait:
            await until(lambda: all(worker.attached for worker in workers))
            await until(lambda: len(streams._router.infos) == len(workers))
        yield streams
    finally:
        await streams.close()
        for worker in workers:
            await worker.stop()


def request(n: int = 1) -> Request:
    return Request(prompt=np.array([1, 2, 3], np.int64), max_tokens=9, n=n)


def tokens(*ids: int, index: int = 0, finish: FinishReason | None = None) -> Update:
    return Update(1, index, tokens=ids, finish_reason=finish)

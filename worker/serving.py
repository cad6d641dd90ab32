"""The worker's end of the data plane: one gRPC stream for each gateway, one message a step on each.

Runs on an event loop beside the engine's thread. Not for clients: gateways are, and they hold the secret.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, Final

import grpc
import grpc.aio

from planner.errors import RequestRefused, Unavailable
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc
from worker import wire
from worker.client import Client, Listener, StepReport
from worker.engine import Engine, EngineState
from worker.executor import ProgramInfo
from worker.listening import listen
from worker.outbox import Outbox
from worker.pulse import LOOK_S, PulseWatch
from worker.totals import Totals

logger = logging.getLogger(__name__)

TELL_AFTER_S: Final = 0.005
"""From a new request to all gateways' knowing of it, at the latest."""

Context = Any  # grpc.aio.ServicerContext[pb.Command, pb.StepUpdates]; grpc ships no types


class DataPlaneServer:
    """Serves one started engine. Lives on one event loop, whose owner calls the methods.

    Order of a quiet end: `drain`, `Engine.stop` (off the loop, it blocks), `stop`.
    """

    def __init__(
        self,
        engine: Engine,
        info: ProgramInfo,
        worker_id: str,
        secret: str,
        max_num_seqs: int,
        host: str,
        port: int = 0,
        options: Sequence[tuple[str, int]] = wire.SERVER_OPTIONS,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """`host` is the address to bind, that gateways reach; port 0 takes a free one. `options` are gRPC's. Without
        `credentials` the data plane is plaintext."""
        self._attachments = _Attachments(engine, _worker_info(info, worker_id, max_num_seqs), secret)
        self._engine = engine
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self._options = options
        self._credentials = credentials
        self._watch = PulseWatch(time.monotonic())
        self._watching: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    @property
    def engine_quiet_s(self) -> float:
        """For how long the engine has had something to do and not got on, not even within its step, in seconds."""
        return self._watch.quiet_s

    @property
    def totals(self) -> Totals:
        """What the engine has counted, and what was counted here."""
        return self._attachments.totals(self._engine.totals)

    async def start(self) -> str:
        """Listen; return the bound "host:port". Raises `RuntimeError` when the port is taken."""
        server = grpc.aio.server(options=self._options)
        worker_pb2_grpc.add_WorkerServicer_to_server(self._attachments, server)
        address = await listen(server, self._host, self._port, self._credentials)
        self._server = server
        self._watching = asyncio.create_task(self._watch_engine(), name="watch the engine")
        return address

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others; whether all had ended, and were sent, within the time."""
        self._engine.drain()
        self._attachments.tell()  # no gateway learns it by a refusal
        try:
            async with asyncio.timeout(timeout_s):
                await self._attachments.wait_idle()
        except TimeoutError:
            return False
        return True

    async def stop(self, grace_s: float) -> None:
        """Send what there is, end every stream, and close; streams that do not end within `grace_s` are cut."""
        self._attachments.finish()
        if self._watching is not None:
            self._watching.cancel()
        if self._server is not None:
            await self._server.stop(grace_s)

    async def _watch_engine(self) -> None:
        """Let gateways know that what they wait for is worked on, as long as it is."""
        while True:
            if self._watch.look(self._engine.pulse, time.monotonic()):
                self._attachments.beat()
            await asyncio.sleep(LOOK_S)


class _Attachments(worker_pb2_grpc.WorkerServicer):
    """The open streams. A stream's end, for whatever reason, cancels everything that came over it."""

    def __init__(self, engine: Engine, info: pb.WorkerInfo, secret: str) -> None:
        self._engine = engine
        self._info = info
        self._secret = secret.encode()
        self._num_refused = 0
        self._outboxes: set[Outbox] = set()
        self._telling: asyncio.TimerHandle | None = None
        self._sent = asyncio.Event()

    async def Attach(self, commands: AsyncIterator[pb.Command], context: Context) -> None:  # noqa: N802 - gRPC's name
        if not wire.knows_secret(context.invocation_metadata(), self._secret):
            self._note_stranger(context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{wire.SECRET_METADATA} is missing or wrong")
        outbox = Outbox()
        try:
            client = self._engine.connect(self._listener(outbox))
        except Unavailable as refusal:
            await context.abort(grpc.StatusCode.UNAVAILABLE, refusal.message)
        self._outboxes.add(outbox)
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(commands, client, outbox))
                await self._write(outbox, context)
                reader.cancel()
        finally:
            client.close()
            self._outboxes.discard(outbox)
            self._sent.set()

    def totals(self, engine: Totals) -> Totals:
        """The engine's, and what was counted here."""
        return replace(engine, streams_refused=self._num_refused)

    async def wait_idle(self) -> None:
        """Until no stream has an open request or anything unsent."""
        while not all(outbox.is_idle for outbox in self._outboxes):
            self._sent.clear()
            await self._sent.wait()

    def tell(self) -> None:
        """Let all gateways know how this worker is now."""
        self._tell_no_more()
        for outbox in self._outboxes:
            outbox.tell(self._engine.snapshot, draining=self._draining)

    def beat(self) -> None:
        for outbox in self._outboxes:
            outbox.beat()

    def finish(self) -> None:
        for outbox in self._outboxes:
            outbox.finish()

    @property
    def _draining(self) -> bool:
        return self._engine.state is not EngineState.RUNNING

    async def _read(self, commands: AsyncIterator[pb.Command], client: Client, outbox: Outbox) -> None:
        async for command in commands:
            await outbox.wait_for_room()
            match command.WhichOneof("command"):
                case "submit":
                    _submit(command.submit, client, outbox)
                    self._tell_soon()
                case "cancel":
                    client.cancel(command.cancel.request_id, tuple(command.cancel.indices) or None)
                case "recall":
                    client.recall(command.recall.request_id)
                case "read":
                    outbox.note_read(command.read.num_messages)
                case None:
                    logger.warning("a gateway sent a command that this version does not know")
        outbox.hang_up()

    async def _write(self, outbox: Outbox, context: Context) -> None:
        adapters = pb.Adapters(adapters=map(wire.adapter_to_proto, self._engine.adapters))
        await context.write(pb.StepUpdates(info=self._info, adapters=adapters))
        while (message := await outbox.next()) is not None:
            await context.write(message)
            outbox.note_sent()
            self._sent.set()

    def _listener(self, outbox: Outbox) -> Listener:
        loop = asyncio.get_running_loop()

        def listen(report: StepReport) -> None:
            loop.call_soon_threadsafe(lambda: self._add(report, outbox))

        return listen

    def _add(self, report: StepReport, outbox: Outbox, *, of_engine: bool = True) -> None:
        """With what has come since the report was made: gateways count upon hearing of all that they had asked for."""
        totals = None if report.totals is None else self.totals(report.totals)
        told = replace(report, snapshot=self._engine.snapshot, totals=totals)
        outbox.add(told, draining=self._draining, of_engine=of_engine)
        self._tell_no_more()

    def _tell_no_more(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None

    def _tell_soon(self) -> None:
        """Let all gateways know of new requests, where no step ends soon that tells them: what others do not know of
        they would send requests on top of."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_AFTER_S, self.tell)

    def _note_stranger(self, peer: str) -> None:
        """Count a stream without the secret, and let all gateways know, though there may be no step to tell it with."""
        self._num_refused += 1
        logger.warning("refused a stream from %s: it lacks the secret", peer)
        report = StepReport((), self._engine.snapshot, totals=self._engine.totals)
        for outbox in self._outboxes:
            self._add(report, outbox, of_engine=False)


def _submit(submit: pb.Submit, client: Client, outbox: Outbox) -> None:
    try:
        outbox.note_new(submit.request_id)
        request = wire.request_from_proto(submit)
        client.submit(submit.request_id, request)
    except RequestRefused as refusal:
        outbox.refuse(submit.request_id, refusal)
    else:
        outbox.open(submit.request_id, request.n)


def _worker_info(info: ProgramInfo, worker_id: str, max_num_seqs: int) -> pb.WorkerInfo:
    return pb.WorkerInfo(
        worker_id=worker_id,
        model=info.name,
        vocab_size=info.vocab_size,
        context=info.context,
        num_cells=info.num_cells,
        max_prefill_tokens=info.max_prefill_tokens,
        min_prefill_tokens=info.min_prefill_tokens,
        max_num_seqs=max_num_seqs,
        device=info.device,
        dtype=info.dtype,
        vector_size=info.vector_size,
    )

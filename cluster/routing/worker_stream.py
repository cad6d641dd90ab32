"""The one gRPC stream between this gateway and one worker: commands out, the updates of all requests in.

A worker is identified by its replica, so a stream that breaks and opens again reaches the same worker or none: after
a break nothing that ran is still there (`protos/worker.proto`), and its runs are lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection
from dataclasses import replace

import grpc
from opentelemetry.trace import Tracer

from cluster.routing.backlog import Backlog
from cluster.routing.cancel_watch import CancelWatch
from cluster.routing.fleet import WorkerReport
from cluster.routing.last_report import LastReport
from cluster.routing.live_runs import LiveRuns
from cluster.routing.membership import Member
from cluster.routing.outbox import Outbox
from cluster.routing.run import Run
from cluster.routing.stall_watch import StallWatch
from cluster.routing.stream_listeners import RunKeeper, StreamObserver
from cluster.routing.worker_channel import HELLO_TIMEOUT_S, channel_to, why_it_ended
from cluster.telemetry.gateway_meter import GatewayMeter
from cluster.telemetry.run_spans import CANCELLED, ENDED, MOVED, RunEnd, RunSpans, lost, refused
from planner.errors import RaycombError, RequestRefused, Unavailable, WorkerLost
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc as pb_grpc
from worker.wire import (
    SECRET_METADATA,
    adapter_from_proto,
    blocks_from_proto,
    request_to_proto,
    update_from_proto,
)

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


class WorkerStream:
    """Keeps one stream open until `retire`; demultiplexes what comes. Owner: `Streams`, on the gateway's event loop.

    A worker that has something to run and says nothing for `stall_timeout_s` hangs: the stream is broken off, and
    the worker gets nothing more before its engine has spoken again. `opening`: it is being opened for the first time.
    `drains_since`: on the event loop's clock.
    """

    def __init__(
        self,
        member: Member,
        secret: str,
        observer: StreamObserver,
        keeper: RunKeeper,
        stall_timeout_s: float,
        meter: GatewayMeter,
        tracer: Tracer,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.member = member
        self._secret = secret
        self._observer = observer
        self._keeper = keeper
        self._meter = meter
        self._spans = RunSpans(tracer, member.worker_id)
        self._credentials = credentials
        self._cancels = CancelWatch(meter.free)
        self._last_report = LastReport()
        self._outbox = Outbox()
        self._live = LiveRuns(lambda request_id: self._cancel(request_id, None))
        self._stall = StallWatch(stall_timeout_s, has_work=lambda: len(self._live) > 0)
        self.backlog = Backlog()
        self.drains_since: float | None = None
        self._open = False
        self.opening = True
        self._retiring = False
        self._idle = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def report(self) -> WorkerReport | None:
        """The last that the worker said of itself; None while no stream is open."""
        return self._last_report.value

    def submit(self, request_id: int, run: Run) -> None:
        """Send a run. Raises `Unavailable`, `QueueFull` or `InvalidRequest`; nothing has then been sent."""
        if not self._open or self._retiring:
            raise Unavailable(f"worker {self.member.worker_id} takes no requests now")
        trace = self._spans.start(request_id, run)
        request = replace(run.request, trace=trace) if trace else run.request
        try:
            self._outbox.submit(request_to_proto(request_id, request))
        except RaycombError as why_not:
            self._spans.end(request_id, refused(why_not))
            raise
        self._cancels.sent(request_id, run.request.n)
        if not self._live:
            self._stall.hear()  # it had nothing to say before
        self._live.add(request_id, run)
        if run.request.adapter is None and not run.was_accepted:  # others may lack it; nobody moves twice
            self.backlog.sent(request_id)
        run.start(lambda indices: self._cancel(request_id, indices))

    def recall(self, count: int) -> int:
        """Ask the last `count` of the backlog back, or all; how many. The worker gives those that have not begun."""
        newest = self.backlog.recall(count)
        for request_id in newest:
            self._outbox.recall(request_id)
        return len(newest)

    def retire(self) -> None:
        """The worker left the membership: take nothing more, let what runs end, then close."""
        self._retiring = True
        self._observer.leave(self.member.worker_id)
        what_then = ": it gets nothing new, and ends what it runs" if self._open else ""
        self._meter.events.note(f"{self.member.worker_id} left the fleet{what_then}")
        self._wake_if_idle()

    async def run(self) -> None:
        """Connect, again after each break, until retired and idle. Ends by itself then, or by cancellation."""
        backoff_s = FIRST_BACKOFF_S
        try:
            while not self._retiring:
                error = await self._attach_until_it_ends()
                was_open, self._open, self.opening = self._open, False, False
                self._leave()
                self._last_report.clear()
                self._end_all(error)
                self._cancels.clear()
                if was_open:
                    self._note_end(error)
                    backoff_s = FIRST_BACKOFF_S
                logger.info("stream to worker %s: %s", self.member.worker_id, error.message)
                await self._sleep_unless_retired(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        finally:
            self._open = self.opening = False
            self._leave()
            self._end_all(WorkerLost("the gateway is shutting down"))

    def _note_end(self, error: WorkerLost) -> None:
        self._meter.num_workers_lost += not self._retiring
        self._meter.events.note(f"{self.member.worker_id} is gone" if self._retiring else error.message)

    def _leave(self) -> None:
        """Once retired it has left already, and by now the worker may be back, with a stream of its own."""
        if not self._retiring:
            self._observer.leave(self.member.worker_id)

    async def _attach_until_it_ends(self) -> WorkerLost:
        """One connection's life. Gives the reason why what still runs is lost."""
        worker_id = self.member.worker_id
        self._outbox = Outbox()
        async with channel_to(self.member.address, self._credentials) as channel:
            call = pb_grpc.WorkerStub(channel).Attach(metadata=((SECRET_METADATA, self._secret),))
            writing = asyncio.create_task(self._write(call), name=f"write {worker_id}")
            ending = [
                asyncio.create_task(self._read(call), name=f"read {worker_id}"),
                asyncio.create_task(self._wait_until_retired(), name=f"retire {worker_id}"),
                asyncio.create_task(self._stall.wait(), name=f"watch {worker_id}"),
            ]
            tasks = [writing, *ending]
            try:
                done, _ = await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                call.cancel()
        errors = [error for task in done if not task.cancelled() and (error := task.exception()) is not None]
        if self._stall.has_stalled and not errors:
            return WorkerLost(f"worker {worker_id} said nothing for {self._stall.timeout_s:g} s")
        return WorkerLost(f"the stream to worker {worker_id} {why_it_ended(errors)}")

    async def _read(self, call: grpc.aio.StreamStreamCall[pb.Command, pb.StepUpdates]) -> None:
        messages = aiter(call)
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            hello = await anext(messages, None)
        if hello is None or hello.info.worker_id != self.member.worker_id:
            return  # not this worker: its port may have gone to another one
        if not self._stall.has_stalled:
            self._join(hello)
        num_messages = 0
        async for message in messages:
            if self._stall.has_stalled and not message.beside_engine:
                self._stall.recover()
                self._join(hello)
            self._dispatch(message)
            # Written by a task that wakes behind the readers woken just now, so it follows their having read.
            num_messages += 1
            self._outbox.note_read(num_messages)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.Command, pb.StepUpdates]) -> None:
        while True:
            command = await self._outbox.take()
            try:
                await call.write(command)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the call is over; the reader first takes what the worker had still sent, and then says why

    async def _wait_until_retired(self) -> None:
        await self._idle.wait()

    async def _sleep_unless_retired(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return

    def _join(self, hello: pb.StepUpdates) -> None:
        if self._retiring:
            return
        self._open, self.opening = True, False
        self._observer.join(self._last_report.introduce(hello.info))
        self._meter.events.note(f"{self.member.worker_id} joined")
        self._dispatch(hello)

    def _dispatch(self, message: pb.StepUpdates) -> None:
        if message.HasField("snapshot"):
            self._last_report.take(message)
            if message.snapshot.draining and self.drains_since is None:
                self.drains_since = self._loop.time()
            if (report := self.report) is not None:
                newest = message.snapshot.newest_request
                self._observer.observe(
                    self.member.worker_id, report.snapshot, draining=report.draining, newest_request=newest
                )
        if message.HasField("blocks"):
            self._observer.learn(self.member.worker_id, blocks_from_proto(message.blocks))
        if message.HasField("adapters"):
            adapters = map(adapter_from_proto, message.adapters.adapters)
            self._observer.equip(self.member.worker_id, tuple(adapters))
        if not message.beside_engine:
            self._stall.hear()
        losses: dict[int, tuple[Run, WorkerLost]] = {}
        for entry in message.updates:
            num_cached = entry.num_cached_tokens if entry.tokens else None
            if entry.finish_reason:
                is_refusal = entry.finish_reason == pb.FINISH_REASON_REFUSED
                self._cancels.ended(entry.request_id, self._loop.time(), whole=is_refusal)
            self._observer.settle(self.member.worker_id, entry.request_id, num_cached)
            run = self._live.get(entry.request_id)
            if run is None:
                continue  # cancelled here; the worker's last words for it are on their way
            update = update_from_proto(entry)
            if isinstance(update, RequestRefused):
                self._take_back(entry.request_id, run, update)
                continue
            self.backlog.heard_of(entry.request_id)
            run.deliver(update)
            if run.loss is not None:
                losses[entry.request_id] = run, run.loss
            elif run.over:
                self._forget(entry.request_id, ENDED)
        for request_id, (run, loss) in losses.items():
            self._spans.end(request_id, lost(loss))
            self._cancel(request_id, None)
            self._keeper.lost([run], loss)

    def _take_back(self, request_id: int, run: Run, refusal: RequestRefused) -> None:
        if self.backlog.was_recalled(request_id):
            self._forget(request_id, MOVED)
            self._keeper.recalled(run)
        else:
            self._forget(request_id, refused(refusal))
            self._keeper.refused(run, self.member.worker_id, refusal)

    def _cancel(self, request_id: int, indices: Collection[int] | None) -> None:
        if request_id not in self._live:
            return
        self._outbox.cancel(request_id, indices)
        if indices is None:
            self._cancels.cancelled(request_id, self._loop.time())
            self._forget(request_id, CANCELLED)

    def _forget(self, request_id: int, end: RunEnd) -> None:
        self._spans.end(request_id, end)
        self._observer.settle(self.member.worker_id, request_id)
        self.backlog.forget(request_id)
        self._live.remove(request_id)
        self._wake_if_idle()

    def _wake_if_idle(self) -> None:
        if self._retiring and not self._live:
            self._idle.set()

    def _end_all(self, error: WorkerLost) -> None:
        orphans = self._live.runs
        for request_id in self._live.ids:
            self._forget(request_id, lost(error))
        if orphans:
            self._keeper.lost(orphans, error)

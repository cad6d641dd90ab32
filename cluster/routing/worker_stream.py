"""The one gRPC stream between this gateway and one worker: commands out, the updates of all requests in.

A worker is identified by its replica, so a stream that breaks and opens again reaches the same worker or none: after
a break nothing that ran is still there (`protos/worker.proto`), and its runs are lost.
"""

from __future__ import annotations

import asyncio
import logging
import random

import grpc
from opentelemetry.trace import Tracer

from cluster.routing.backlog import Backlog
from cluster.routing.fleet import WorkerReport
from cluster.routing.last_report import LastReport
from cluster.routing.membership import Member
from cluster.routing.prompt_scores import PromptScores, long_prompt_scores
from cluster.routing.run import Run
from cluster.routing.sent_runs import SentRuns
from cluster.routing.stall_watch import StallWatch
from cluster.routing.stream_listeners import RunKeeper, StreamObserver
from cluster.routing.succession import Succession
from cluster.routing.worker_channel import HELLO_TIMEOUT_S, channel_to, why_it_ended
from cluster.telemetry.gateway_meter import GatewayMeter
from planner.errors import Unavailable, WorkerLost
from protos import worker_pb2 as pb
from protos import worker_pb2_grpc as pb_grpc
from worker.wire import SECRET_METADATA, adapter_from_proto, blocks_from_proto

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 2.0


class WorkerStream:
    """Keeps one stream open until `retire`; hands on what comes. Owner: `Streams`, on the gateway's event loop.

    A worker that has something to run and says nothing for `stall_timeout_s` hangs: the stream is broken off, and
    the worker gets nothing more before its engine has spoken again. `opening`: it is being opened for the first time.
    """

    def __init__(
        self,
        member: Member,
        secret: str,
        observer: StreamObserver,
        keeper: RunKeeper,
        succession: Succession,
        stall_timeout_s: float,
        meter: GatewayMeter,
        tracer: Tracer,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.member = member
        self._secret = secret
        self._observer = observer
        self._succession = succession
        self._meter = meter
        self._credentials = credentials
        self._last_report = LastReport()
        self._runs = SentRuns(member.worker_id, observer, keeper, meter.free, tracer, left=self._wake_if_idle)
        self._stall = StallWatch(stall_timeout_s, has_work=lambda: len(self._runs) > 0)
        self._drains = False
        self._open = False
        self.opening = True
        self._retiring = False
        self._idle = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    def num_live(self) -> int:
        return len(self._runs)

    @property
    def backlog(self) -> Backlog:
        """The runs that may not have begun there."""
        return self._runs.backlog

    @property
    def report(self) -> WorkerReport | None:
        """The last that the worker said of itself; None while no stream is open."""
        return self._last_report.value

    def submit(self, request_id: int, run: Run) -> None:
        """Send a run. Raises `Unavailable`, `QueueFull` or `InvalidRequest`; nothing has then been sent."""
        if not self._open or self._retiring:
            raise Unavailable(f"worker {self.member.worker_id} takes no requests now")
        if not self._runs:
            self._stall.hear()  # it had nothing to say before
        self._runs.submit(request_id, run)

    def recall(self, count: int) -> int:
        """Ask the last `count` of the backlog back, or all; how many. The worker gives those that have not begun."""
        return self._runs.recall(count)

    def retire(self) -> None:
        """The worker left the membership: take nothing more, let what runs end, then close."""
        self._retiring = True
        if self._open:  # it was not lost
            self._succession.begin()
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
                self._runs.lose_all(error)
                if was_open:
                    self._note_end(error)
                    backoff_s = FIRST_BACKOFF_S
                logger.info("stream to worker %s: %s", self.member.worker_id, error.message)
                await self._sleep_unless_retired(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
        finally:
            self._open = self.opening = False
            self._leave()
            self._runs.lose_all(WorkerLost("the gateway is shutting down"))

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
        async with channel_to(self.member.address, self._credentials) as channel:
            call = pb_grpc.WorkerStub(channel).Attach(metadata=((SECRET_METADATA, self._secret),))
            tasks = [
                asyncio.create_task(self._write(call), name=f"write {worker_id}"),
                asyncio.create_task(self._read(call), name=f"read {worker_id}"),
                asyncio.create_task(self._wait_until_retired(), name=f"retire {worker_id}"),
                asyncio.create_task(self._stall.wait(), name=f"watch {worker_id}"),
            ]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
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
            scores = await long_prompt_scores(message.updates)
            if self._stall.has_stalled and not message.beside_engine:
                self._stall.recover()
                self._join(hello)
            self._dispatch(message, scores)
            # Written by a task that wakes behind the readers woken just now, so it follows their having read.
            num_messages += 1
            self._runs.outbox.note_read(num_messages)

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.Command, pb.StepUpdates]) -> None:
        """Ends by cancellation alone."""
        while True:
            command = await self._runs.outbox.take()
            try:
                await call.write(command)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The call is over; the reader first takes what the worker had still sent, and then says why.
                await self._loop.create_future()

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
        self._dispatch(hello, {})

    def _dispatch(self, message: pb.StepUpdates, scores: PromptScores) -> None:
        if message.HasField("snapshot"):
            self._last_report.take(message)
            if message.snapshot.draining and not self._drains:
                self._drains = True
                self._succession.begin()
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
        self._runs.deliver(message.updates, scores)

    def _wake_if_idle(self) -> None:
        if self._retiring and not self._runs:
            self._idle.set()

"""The workers as one `cluster.routing.fleet.Fleet`: a stream to each member, and each request on the right one."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from dataclasses import replace

import grpc
from opentelemetry.trace import NoOpTracer, Tracer

from cluster.routing.failover import Failover, FailoverLimits
from cluster.routing.fleet import ServedModel, WorkerReport
from cluster.routing.generation import RemoteGeneration
from cluster.routing.membership import Members
from cluster.routing.rebalance import Rebalancer
from cluster.routing.router import Predictions, Router
from cluster.routing.run import Run
from cluster.routing.succession import Succession
from cluster.routing.worker_stream import WorkerStream
from cluster.telemetry.gateway_meter import GatewayMeter
from planner.errors import RaycombError, Unavailable
from planner.request import Adapter, Request

logger = logging.getLogger(__name__)


class Streams:
    """Owner: the gateway, on its event loop. `set_members` follows the membership; `close` ends everything.

    `fault` is what broke a stream other than its connection: a fault of ours, for which the gateway is restarted.

    Streams run in tasks with an empty context: one that was opened inside a request's context would die with that
    request's client.
    """

    def __init__(
        self,
        model_name: str,
        secret: str,
        router: Router,
        failover_limits: FailoverLimits | None = None,
        meter: GatewayMeter | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._model_name = model_name
        self._created = int(time.time())
        self._secret = secret
        self._router = router
        self._limits = failover_limits or FailoverLimits()
        self._meter = meter or GatewayMeter()
        self._credentials = credentials
        self._tracer = tracer or NoOpTracer()
        self._succession = Succession(self._limits.timeout_s)
        self._failover = Failover(self._start, self._limits, self._succession, self._expects_worker)
        self._next_request_id = 1
        self._last_model: ServedModel | None = None
        self.fault: BaseException | None = None
        self._streams: dict[str, WorkerStream] = {}
        self._tasks: dict[asyncio.Task[None], WorkerStream] = {}
        self._rebalancer = Rebalancer(router, self._streams, self._meter)

    @property
    def model(self) -> ServedModel | None:
        """Of several workers, what the smallest can do; the model stays known while no worker is there."""
        if infos := self._router.infos:
            self._last_model = ServedModel(
                name=self._model_name,
                created=self._created,
                vocab_size=min(info.vocab_size for info in infos),
                context=min(info.context for info in infos),
                capacity=min(info.num_cells for info in infos),
                max_num_seqs=min(info.max_num_seqs for info in infos),
                vector_size=infos[0].vector_size,  # workers of one model have the same
            )
        return self._last_model

    @property
    def adapters(self) -> dict[str, Adapter]:
        return self._router.adapters

    def num_without(self, name: str) -> int:
        return self._router.num_without(name)

    @property
    def ready(self) -> bool:
        return self._router.ready

    @property
    def predictions(self) -> Predictions:
        """How well it was foreseen what prompts would find resident; a copy."""
        return replace(self._router.predictions)

    @property
    def reports(self) -> list[WorkerReport]:
        """Of workers with an open stream, those included that only finish what they run."""
        return [stream.report for stream in self._tasks.values() if stream.report is not None]

    @property
    def num_live(self) -> int:
        """Runs whose end has not come yet: one a request, or after a failover one a sequence."""
        return sum(stream.num_live for stream in self._tasks.values()) + self._failover.num_waiting

    def set_members(self, members: Members) -> None:
        """Open streams to new members; retire those of workers that left, which end when they are idle. What has not
        begun there is asked back if others take requests."""
        leaving = [self._streams.pop(worker_id) for worker_id in self._streams.keys() - members.keys()]
        for stream in leaving:
            stream.retire()
        if self._router.ready:  # what waits at those that leave can begin at one that stays
            for stream in leaving:
                stream.recall(stream.backlog.num_movable)
        for worker_id in sorted(members.keys() - self._streams.keys()):
            stream = WorkerStream(
                members[worker_id],
                self._secret,
                self._router,
                self._failover,
                self._succession,
                self._limits.stall_timeout_s,
                self._meter,
                self._tracer,
                self._credentials,
            )
            self._streams[worker_id] = stream
            task = asyncio.create_task(stream.run(), name=f"stream {worker_id}", context=contextvars.Context())
            self._tasks[task] = stream
            task.add_done_callback(self._ended)
        self._rebalancer.start()

    def submit(self, request: Request) -> RemoteGeneration:
        generation = RemoteGeneration(self._next_request_id, request)
        try:
            self._start(generation.first_run)
        except Unavailable:
            if not self._expects_worker():
                raise
            self._failover.begin(generation.first_run)
        return generation

    def _expects_worker(self) -> bool:
        """Whether a stream is being opened for the first time, or a worker made room for one that is still to come."""
        return self._succession.is_due or any(stream.opening for stream in self._streams.values())

    def expect_worker(self) -> None:
        """The first one is still to come."""
        self._succession.begin()

    def set_succession(self, *, possible: bool) -> None:
        """Whether a worker that leaves makes room for another. Where none follows, new requests are refused at once,
        and so are those that wait."""
        self._succession.possible = possible
        self._failover.look_again()

    async def close(self) -> None:
        """Break every stream; what runs ends as lost, and the workers cancel it."""
        self._failover.close()
        self._rebalancer.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._streams.clear()

    def _start(self, run: Run) -> None:
        """Send a run to a worker. Raises `RequestRefused`; nothing has then been sent."""
        request_id = self._next_request_id
        worker_id = self._router.assign(request_id, run.request, avoid=run.refused_by)
        try:
            self._streams[worker_id].submit(request_id, run)
        except RaycombError:
            self._router.settle(worker_id, request_id)
            raise
        if run.num_losses:
            self._meter.num_failovers += len(run.live)
            self._meter.events.note(f"{worker_id} goes on with {len(run.live)} of a lost worker's sequences")
        self._next_request_id += 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        stream = self._tasks.pop(task)
        if self._streams.get(stream.member.worker_id) is stream:
            del self._streams[stream.member.worker_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fault = error
            logger.error("the stream to worker %s met a fault", stream.member.worker_id, exc_info=error)

"""The gateway as a Serve deployment: HTTP and gRPC in front, a stream to each worker behind. Never loads torch."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from cluster.activity import Activity, activity
from cluster.answer_maker import AnswerMaker, Service
from cluster.batch_api import Batches
from cluster.batch_desk import BatchDesk
from cluster.batch_runner import BatchRunner
from cluster.checkpoints import resolve
from cluster.config import ServiceConfig
from cluster.failover import FailoverLimits
from cluster.gateway_meter import GatewayMeter
from cluster.gateway_metrics import gateway_samples
from cluster.grpc_api import GrpcApi
from cluster.grpc_health import Health
from cluster.grpc_methods import GrpcMethods
from cluster.http_api import create_app
from cluster.listing import follow_listing
from cluster.membership import Members, board, board_key
from cluster.ray_metrics import RayMetrics
from cluster.request_log import log_requests_to
from cluster.roll_call import RollCaller
from cluster.router import Predictions, Router
from cluster.service_metrics import gateway_labels
from cluster.session_keeper import RemoteOwner
from cluster.streams import Streams
from cluster.text import load_text
from worker.tls import channel_credentials
from worker.tracing import open_tracing

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")

TAKE_OVER_S: Final = 10.0
"""A new gateway waits so long for what it can expect within a second."""

LOOK_S: Final = 0.05


@serve.ingress()
class Gateway(GrpcMethods):
    """Serve owns it and calls every method on one event loop, which also owns the streams.

    `workers` is the handle to the worker deployment. No token passes through it: holding it makes Serve tell this
    process which workers there are. `sessions`: the handle to their keeper, where the service has any.
    """

    async def __init__(  # type: ignore[misc]
        self, config: ServiceConfig, workers: DeploymentHandle[Any], sessions: DeploymentHandle[Any] | None
    ) -> None:
        context = serve.get_replica_context()
        log_requests_to(logger, context.app_name)
        text = await asyncio.to_thread(lambda: load_text(resolve(config.engine.model)))
        replica_tag = context.replica_tag
        router = Router(
            max_waiting=config.engine.max_waiting,
            max_waiting_tokens=config.engine.max_waiting_tokens,
            offset=zlib.crc32(replica_tag.encode()),
        )
        limits = FailoverLimits(config.failover_timeout_s, config.max_failovers, config.stall_timeout_s)
        meter = GatewayMeter()
        credentials = None if config.data_plane_tls is None else channel_credentials(Path(config.data_plane_tls))
        self._tracing = open_tracing(config.otlp_endpoint, config.otlp_protocol, "raycomb-gateway", replica_tag)
        tracer = self._tracing.tracer
        secret = config.secret.get_secret_value()
        self._streams = Streams(config.model_name, secret, router, limits, meter, credentials, tracer)
        self._members: Members | None = None
        roll = RollCaller(lambda steps: self._workers.broadcast("inspect", steps), lambda: self._members or {})
        service = Service(
            self._streams,
            text,
            config.http,
            meter,
            roll.call,
            model_name=config.model_name,
            gateway_id=replica_tag,
            sessions=None if sessions is None else RemoteOwner(sessions, (RayError, RayServeException)),
            tracer=tracer,
        )
        self._maker = AnswerMaker(service)
        self._batches = await self._open_batches(config.http.batch_store)
        self._grpc = GrpcApi(self._maker)
        self._health = Health(self._streams)
        self._program = config.program
        self._draining = False
        self._unsubscribe = self._follow(workers)
        labels = gateway_labels(service.model_name, service.gateway_id)
        self._ray_metrics = RayMetrics(labels, lambda: gateway_samples(meter, self._streams))
        self._ray_metrics.start()
        self._workers = workers.options()  # `options` starts the handle's router, and with it the membership's flow
        self._unfollow = follow_listing(context, self._set_listed)
        await self._take_over()

    def __serve_build_asgi_app__(self) -> Any:
        """Serve asks for the application once, after the constructor."""
        return create_app(self._maker, self._batches, tells_request_id=False)

    async def _open_batches(self, folder: str | None) -> Batches | None:
        if folder is None:
            return None
        desk = await asyncio.to_thread(lambda: BatchDesk(Path(folder).expanduser()))
        runner = BatchRunner(self._maker, desk)
        runner.start()
        return Batches(desk, runner)

    def _follow(self, workers: DeploymentHandle[Any]) -> Callable[[], None]:
        """Hear of the workers' membership from now on; gives the way to end that."""
        loop = asyncio.get_running_loop()

        def follow(members: Members) -> None:  # on Serve's router thread
            loop.call_soon_threadsafe(self._set_members, members)

        return board().subscribe(board_key(workers.app_name, workers.deployment_name), follow)

    def _set_members(self, members: Members) -> None:
        self._members = members
        if not self._draining:
            self._streams.set_members({name: each for name, each in members.items() if each.program == self._program})

    def _set_listed(self, listed: bool) -> None:
        """Serve sends requests here, or no more. Those that are on their way are served, and what runs goes on."""
        if self._draining:
            return
        if listed:
            self._health.resume()
        else:
            self._health.drain()

    async def _take_over(self) -> None:
        """Where there are workers, be constructed only when requests can be served: until then Serve leaves them to the
        gateways of the version before, whose workers may run something else. The first gateways find none."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while not self._streams.ready:
            others_serve = self._members and all(each.program != self._program for each in self._members.values())
            if self._members == {} or (not others_serve and loop.time() - started_at > TAKE_OVER_S):
                return
            await asyncio.sleep(LOOK_S)

    async def drain(self) -> None:
        """Take no new requests and say so; what runs goes on. Asked over a Serve handle by whoever ends the service."""
        self._draining = True
        self._health.drain()
        self._streams.set_members({})

    async def check_health(self) -> None:
        if self._streams.fault is not None:
            raise RuntimeError("a stream to a worker met a fault of ours") from self._streams.fault

    async def activity(self) -> Activity:
        """What is alive here; asked over a Serve handle by whoever looks for leaks."""
        return activity(self._streams.num_live)

    async def predictions(self) -> Predictions:
        """How well this gateway foresaw what prompts find resident at the workers; asked over a Serve handle."""
        return self._streams.predictions

    async def __del__(self) -> None:
        """Serve's shutdown hook, after the requests that ran here have ended or the time for that is up."""
        if hasattr(self, "_unfollow"):
            self._unfollow()
            self._unsubscribe()
            if self._batches is not None:
                await self._batches.runner.close()
                await self._batches.desk.close()
            await self._maker.shut()
            await self._streams.close()
            await self._ray_metrics.stop()
            await asyncio.to_thread(self._tracing.close)

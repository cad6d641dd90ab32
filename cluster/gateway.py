"""The gateway as a Serve deployment: HTTP and gRPC in front, a stream to each worker behind. Never loads torch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster.batches.api import Batches
from cluster.batches.desk import BatchDesk
from cluster.batches.runner import BatchRunner
from cluster.checkpoints import resolve
from cluster.config import ServiceConfig
from cluster.gateway_model import GatewayModel
from cluster.language.text import TextModel, load_text
from cluster.models import Models
from cluster.routing.router import Predictions
from cluster.rpc.api import GrpcApi
from cluster.rpc.health import Health
from cluster.rpc.methods import GrpcMethods
from cluster.serving.listing import follow_listing
from cluster.sessions.keeper_link import KeeperLink
from cluster.sessions.owner import ScopedOwner
from cluster.telemetry.activity import Activity, activity
from cluster.telemetry.ray_metrics import RayMetrics
from cluster.telemetry.request_log import request_log_beside
from cluster.web.api import create_app
from worker.heap import settle
from worker.tls import channel_credentials
from worker.tracing import open_tracing

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway(GrpcMethods):
    """Serve owns it and calls every method on one event loop, which also owns the streams.

    `workers`: for each model, in the order of `config.each`, the handle to the deployment that runs it. `sessions`: the
    handle to their keeper, where the service has any.
    """

    async def __init__(  # type: ignore[misc]
        self, config: ServiceConfig, workers: Sequence[DeploymentHandle[Any]], sessions: DeploymentHandle[Any] | None
    ) -> None:
        context = serve.get_replica_context()
        self._request_log = request_log_beside(logger)
        tell = None if self._request_log is None else self._request_log.write
        texts = [await asyncio.to_thread(_text_of, one) for one in config.each]
        credentials = None if config.data_plane_tls is None else channel_credentials(Path(config.data_plane_tls))
        tag = context.replica_tag
        self._tracing = open_tracing(config.otlp_endpoint, config.otlp_protocol, "raycomb-gateway", tag)
        secret = config.secret.get_secret_value()
        self._keeper = None if sessions is None else KeeperLink(sessions, secret, credentials)
        self._each = [
            GatewayModel(
                one,
                handle,
                text,
                tag,
                credentials,
                self._tracing.tracer,
                tell,
                self._sessions_of(one.model_name if config.others else ""),
            )
            for one, handle, text in zip(config.each, workers, texts, strict=True)
        ]
        self._models = Models([one.maker for one in self._each])
        self._batches = await self._open_batches(config.http.batch_store)
        self._grpc = GrpcApi(self._models)
        self._health = Health(self._models)
        self._draining = False
        self._ray_metrics = RayMetrics(lambda: [one.metrics for one in self._each])
        self._ray_metrics.start()
        for one in self._each:
            one.open()
        if self._keeper is not None:
            self._keeper.open()
        self._unfollow = follow_listing(context, self._set_listed, self._set_deployed)
        await asyncio.gather(*(one.take_over() for one in self._each))

    def __serve_build_asgi_app__(self) -> Any:
        """Serve asks for the application once, after the constructor."""
        app = create_app(self._models, self._batches, tells_request_id=False)
        settle()
        return app

    def _sessions_of(self, scope: str) -> ScopedOwner | None:
        return None if self._keeper is None else ScopedOwner(self._keeper.owner, scope)

    async def _open_batches(self, folder: str | None) -> Batches | None:
        if folder is None:
            return None
        desk = await asyncio.to_thread(lambda: BatchDesk(Path(folder).expanduser()))
        runner = BatchRunner(self._models, desk)
        runner.start()
        return Batches(desk, runner)

    def _set_listed(self, listed: bool) -> None:
        """Serve sends requests here, or no more. Those that are on their way are served, and what runs goes on."""
        if self._draining:
            return
        if listed:
            self._health.resume()
        else:
            self._health.drain()

    def _set_deployed(self, is_deployed: bool) -> None:
        for one in self._each:
            one.set_deployed(is_deployed)

    async def drain(self) -> None:
        """Take no new requests and say so; what runs goes on. Asked over a Serve handle by whoever ends the service."""
        self._draining = True
        self._health.drain()
        for one in self._each:
            one.drain()

    async def num_open(self) -> int:
        """Requests for tokens that are being answered here; asked over a Serve handle by whoever ends the service."""
        return sum(one.maker.service.meter.num_open for one in self._each)

    async def give_up(self) -> None:
        """End what is still being answered with an error that says so; asked by whoever ends the service, when its
        patience has ended."""
        for one in self._each:
            await one.streams.close()

    async def check_health(self) -> None:
        for one in self._each:
            if one.streams.fault is not None:
                raise RuntimeError("a stream to a worker met a fault of ours") from one.streams.fault

    async def activity(self) -> Activity:
        """What is alive here; asked over a Serve handle by whoever looks for leaks."""
        return activity(sum(one.streams.num_live for one in self._each))

    async def predictions(self) -> Predictions:
        """How well this gateway foresaw what prompts of the first model find resident at its workers; asked over a
        Serve handle."""
        return self._each[0].streams.predictions

    async def __del__(self) -> None:
        """Serve's shutdown hook, after the requests that ran here have ended or the time for that is up."""
        if hasattr(self, "_unfollow"):
            self._unfollow()
            if self._batches is not None:
                await self._batches.runner.close()
                await self._batches.desk.close()
            await asyncio.gather(*(one.close() for one in self._each))
            if self._keeper is not None:
                await self._keeper.close()
            await self._ray_metrics.stop()
            await asyncio.to_thread(self._tracing.close)
            if self._request_log is not None:
                self._request_log.close()


def _text_of(config: ServiceConfig) -> TextModel:
    return load_text(resolve(config.engine.model))

"""The gateway as a Serve deployment: HTTP and gRPC in front, a stream to each worker behind. Never loads torch."""

from __future__ import annotations

import asyncio
import logging
import zlib
from typing import TYPE_CHECKING, Any

from ray import serve

from cluster.activity import Activity, activity
from cluster.answer_maker import AnswerMaker, Service
from cluster.checkpoints import resolve
from cluster.config import ServiceConfig
from cluster.failover import FailoverLimits
from cluster.grpc_api import GrpcApi
from cluster.grpc_health import Health
from cluster.grpc_methods import GrpcMethods
from cluster.http_api import create_app
from cluster.membership import Members, board, board_key
from cluster.router import Predictions, Router
from cluster.streams import Streams
from cluster.text import load_text

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("ray.serve")


@serve.ingress()
class Gateway(GrpcMethods):
    """Serve owns it and calls every method on one event loop, which also owns the streams.

    `workers` is the handle to the worker deployment. No token passes through it: holding it makes Serve tell this
    process which workers there are.
    """

    async def __init__(self, config: ServiceConfig, workers: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        text = await asyncio.to_thread(lambda: load_text(resolve(config.engine.model)))
        replica_tag = serve.get_replica_context().replica_tag
        router = Router(
            max_waiting=config.engine.max_waiting,
            max_waiting_tokens=config.engine.max_waiting_tokens,
            offset=zlib.crc32(replica_tag.encode()),
        )
        limits = FailoverLimits(config.failover_timeout_s, config.max_failovers, config.stall_timeout_s)
        self._streams = Streams(config.model_name, config.secret.get_secret_value(), router, limits)
        self._maker = AnswerMaker(Service(self._streams, text, config.http, config.num_gateways))
        self._grpc = GrpcApi(self._maker)
        self._health = Health(self._streams)
        loop = asyncio.get_running_loop()

        def follow(members: Members) -> None:  # on Serve's router thread
            loop.call_soon_threadsafe(self._set_members, members)

        self._unsubscribe = board().subscribe(board_key(workers.app_name, workers.deployment_name), follow)
        self._workers = workers.options()  # `options` starts the handle's router, and with it the membership's flow

    def __serve_build_asgi_app__(self) -> Any:
        """Serve asks for the application once, after the constructor."""
        return create_app(self._maker, tells_request_id=False)

    def _set_members(self, members: Members) -> None:
        if not self._health.draining:
            self._streams.set_members(members)

    async def drain(self) -> None:
        """Take no new requests and say so; what runs goes on. Asked over a Serve handle by whoever ends the service."""
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
        if hasattr(self, "_unsubscribe"):
            self._unsubscribe()
            await self._streams.close()

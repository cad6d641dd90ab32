"""What a gateway has of one model: the streams to its workers, its text side, and what makes answers of the two."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
from opentelemetry.trace import Tracer

from cluster.adapters.catalogue import AdapterCatalogue
from cluster.adapters.desk import AdapterDesk
from cluster.adapters.store import KvAdapterStore
from cluster.adapters.sync import sync_workers
from cluster.answers.maker import AnswerMaker, Service
from cluster.config import ServiceConfig
from cluster.language.text import TextModel
from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member, Members, board_key, follow_members
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from cluster.sessions.owner import SessionOwner
from cluster.telemetry.gateway_meter import GatewayMeter
from cluster.telemetry.gateway_metrics import gateway_samples
from cluster.telemetry.metric import Source
from cluster.telemetry.request_log import Tell
from cluster.telemetry.roll_call import RollCaller
from cluster.telemetry.service_metrics import gateway_labels

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

TAKE_OVER_S: Final = 10.0
"""A new gateway waits so long for what it can expect within a second."""

LOOK_S: Final = 0.05


class GatewayModel:
    """Owner: the gateway, on its event loop. `workers` is the handle to the deployment that runs the model. No token
    passes through it: holding it makes Serve tell this process which workers there are."""

    def __init__(
        self,
        config: ServiceConfig,
        workers: DeploymentHandle[Any],
        text: TextModel,
        gateway_id: str,
        credentials: grpc.ChannelCredentials | None,
        tracer: Tracer,
        tell: Tell | None,
        sessions: SessionOwner | None,
    ) -> None:
        """`config` is that of this model alone, `sessions` who keeps those of this model, where there may be any."""
        self._program = config.program
        self._workers = workers
        self._members: Members | None = None
        self._draining = False
        self._is_deployed = True
        self._meter = GatewayMeter()
        router = Router(
            max_waiting=config.engine.max_waiting,
            max_waiting_tokens=config.engine.max_waiting_tokens,
            offset=zlib.crc32(gateway_id.encode()),
        )
        limits = FailoverLimits(
            timeout_s=config.failover_timeout_s,
            max_failovers=config.max_failovers,
            stall_timeout_s=config.stall_timeout_s,
            max_held=config.engine.max_waiting,
        )
        secret = config.secret.get_secret_value()
        self.streams = Streams(config.model_name, secret, router, limits, self._meter, credentials, tracer)
        roll = RollCaller(lambda steps: self._workers.broadcast("inspect", steps), lambda: self._members or {})
        service = Service(
            self.streams,
            text,
            config.http,
            self._meter,
            roll.call,
            model_name=config.model_name,
            gateway_id=gateway_id,
            sessions=sessions,
            adapters=self._adapter_desk(config),
            tracer=tracer,
            tell=tell,
        )
        self.maker = AnswerMaker(service)
        self._labels = gateway_labels(service.model_name, service.gateway_id)
        self._unsubscribe = follow_members(board_key(workers.app_name, workers.deployment_name), self._set_members)

    def open(self) -> None:
        """Start the handle's router, and with it the membership's flow."""
        self._workers = self._workers.options()

    @property
    def metrics(self) -> Source:
        return Source(self._labels, gateway_samples(self._meter, self.streams))

    async def take_over(self) -> None:
        """Where there are workers, return only when requests can be served: until then Serve leaves them to the
        gateways of the version before, whose workers may run something else. The first gateways find none, and so do
        those of a redeploy whose only worker has left: requests then wait for the one that is to come."""
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        while not self.streams.ready:
            if self._members == {}:
                self.streams.expect_worker()
                return
            if not self._others_serve and loop.time() - started_at > TAKE_OVER_S:
                return
            await asyncio.sleep(LOOK_S)

    def drain(self) -> None:
        """Take no new requests; what runs goes on."""
        self._draining = True
        self._follow()

    def set_deployed(self, is_deployed: bool) -> None:
        """Whether the service is to stay: where it is not, no worker follows one that leaves."""
        self._is_deployed = is_deployed
        self._follow()

    async def close(self) -> None:
        """Hand back what sessions are owed, and break every stream."""
        self._unsubscribe()
        await self.maker.shut()
        await self.streams.close()

    def _set_members(self, members: Mapping[str, Member]) -> None:
        self._members = members
        self._follow()

    def _follow(self) -> None:
        """Have streams to those that are to serve, and know whether others will follow them."""
        members = {} if self._draining or self._members is None else self._members
        self.streams.set_succession(possible=self._is_deployed and not self._draining and not self._others_serve)
        self.streams.set_members({name: each for name, each in members.items() if each.program == self._program})

    @property
    def _others_serve(self) -> bool:
        """Whether there are workers, and none of them runs this model: another version has taken over, or is to be."""
        members = self._members or {}
        return bool(members) and all(each.program != self._program for each in members.values())

    def _adapter_desk(self, config: ServiceConfig) -> AdapterDesk | None:
        if config.lora_folder is None:
            return None
        store = KvAdapterStore(self._workers.app_name, self._workers.deployment_name)
        names = {config.model_name, *config.http.served_model_names}
        sync = partial(sync_workers, lambda: self._workers.broadcast("sync_adapters"))
        return AdapterDesk(self.streams, AdapterCatalogue(config.lora_modules, store), sync, config.lora_folder, names)

"""grpc.health.v1.Health over a fleet: whether a request would be served now. Asked without a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final, Protocol

import grpc
from grpc_health.v1 import health_pb2 as pb

from cluster.rpc.status import Call
from protos import inference_pb2

SERVING: Final = pb.HealthCheckResponse.SERVING
NOT_SERVING: Final = pb.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: Final = pb.HealthCheckResponse.SERVICE_UNKNOWN

SERVICES: Final = ("", inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name)
LOOK_S: Final = 0.1


class Served(Protocol):
    """What the health is of."""

    @property
    def ready(self) -> bool:
        """Whether every model takes requests now."""
        ...


class Health:
    """Owner: a gateway; lives on its event loop."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._draining = False

    def drain(self) -> None:
        """Say from now on that nothing is served; watches say so and end, so that nobody waits for them."""
        self._draining = True

    def resume(self) -> None:
        """Take the drain back."""
        self._draining = False

    async def check(self, request: pb.HealthCheckRequest, call: Call) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            call.set_code(grpc.StatusCode.NOT_FOUND)
            call.set_details("there is no such service here")
        return pb.HealthCheckResponse(status=status)

    async def watch(self, request: pb.HealthCheckRequest) -> AsyncGenerator[pb.HealthCheckResponse, None]:
        """The status now and at each change. A fleet tells its state and not its changes, so it is looked at."""
        told = None
        while True:
            status = self._status(request.service)
            if status != told:
                yield pb.HealthCheckResponse(status=status)
                told = status
            if self._draining:
                return
            await asyncio.sleep(LOOK_S)

    async def list(self) -> pb.HealthListResponse:
        return pb.HealthListResponse(
            statuses={service: pb.HealthCheckResponse(status=self._status(service)) for service in SERVICES}
        )

    def _status(self, service: str) -> pb.HealthCheckResponse.ServingStatus:
        if service not in SERVICES:
            return SERVICE_UNKNOWN
        return SERVING if self._served.ready and not self._draining else NOT_SERVING

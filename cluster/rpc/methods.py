"""The RPCs of a gateway under the names that Serve calls them by: the bare names of their methods, of all services."""

# ruff: noqa: N802 - the names are those of the .proto files

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from grpc_health.v1 import health_pb2

from cluster.rpc.api import GrpcApi
from cluster.rpc.health import Health
from cluster.rpc.status import Call
from protos import inference_pb2 as pb


class GrpcMethods:
    """Serve passes a method its request, and the call because the parameter is named `grpc_context`."""

    _grpc: GrpcApi
    _health: Health

    async def Generate(self, request: pb.GenerateRequest, grpc_context: Call) -> AsyncIterator[pb.GenerateResponse]:
        async with aclosing(self._grpc.generate(request, grpc_context)) as messages:
            async for message in messages:
                yield message

    async def Tokenize(self, request: pb.TokenizeRequest, grpc_context: Call) -> pb.TokenizeResponse:
        return await self._grpc.tokenize(request, grpc_context)

    async def Detokenize(self, request: pb.DetokenizeRequest, grpc_context: Call) -> pb.DetokenizeResponse:
        return await self._grpc.detokenize(request, grpc_context)

    async def ListModels(self, request: pb.ListModelsRequest, grpc_context: Call) -> pb.ListModelsResponse:
        return await self._grpc.list_models(request, grpc_context)

    async def Embed(self, request: pb.EmbedRequest, grpc_context: Call) -> pb.EmbedResponse:
        return await self._grpc.embedding.embed(request, grpc_context)

    async def OpenSession(self, request: pb.OpenSessionRequest, grpc_context: Call) -> pb.Session:
        return await self._grpc.sessions.open(request, grpc_context)

    async def GetSession(self, request: pb.GetSessionRequest, grpc_context: Call) -> pb.Session:
        return await self._grpc.sessions.get(request, grpc_context)

    async def ListSessions(self, request: pb.ListSessionsRequest, grpc_context: Call) -> pb.ListSessionsResponse:
        return await self._grpc.sessions.list(request, grpc_context)

    async def ForkSession(self, request: pb.ForkSessionRequest, grpc_context: Call) -> pb.Session:
        return await self._grpc.sessions.fork(request, grpc_context)

    async def CloseSession(self, request: pb.CloseSessionRequest, grpc_context: Call) -> pb.CloseSessionResponse:
        return await self._grpc.sessions.close(request, grpc_context)

    async def Check(self, request: health_pb2.HealthCheckRequest, grpc_context: Call) -> health_pb2.HealthCheckResponse:
        return await self._health.check(request, grpc_context)

    async def Watch(self, request: health_pb2.HealthCheckRequest) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async with aclosing(self._health.watch(request)) as statuses:
            async for status in statuses:
                yield status

    async def List(self, _request: health_pb2.HealthListRequest) -> health_pb2.HealthListResponse:
        return await self._health.list()

"""What the gRPC tests share: a server with a front as Serve's over a scripted fleet, and a client for it.

Serve itself is not here, since importing it is a matter of seconds: `tests/test_grpc_service.py` is about it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc
from opentelemetry.trace import NoOpTracer, Tracer

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.language.text import TextModel
from cluster.models import Models, single
from cluster.rpc.api import GrpcApi
from cluster.rpc.front import add_services
from cluster.rpc.health import Health
from cluster.rpc.methods import GrpcMethods
from cluster.sessions.owner import SessionOwner
from cluster.telemetry.request_log import Tell
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.fake_fleet import FakeFleet
from tests.http_desk import MODEL, TEXT, says


class Methods(GrpcMethods):
    """The RPCs of a gateway, without the gateway."""

    def __init__(self, models: Models, health: Health) -> None:
        self._grpc = GrpcApi(models)
        self._health = health


@dataclass
class GrpcDesk:
    """A client, and what is behind the server."""

    inference: pb_grpc.InferenceStub
    health_stub: health_pb2_grpc.HealthStub
    channel: grpc.aio.Channel
    fleet: FakeFleet
    health: Health
    target: str

    async def generate(self, metadata: Any = (), **fields: Any) -> list[pb.GenerateResponse]:
        """The whole stream. Raises `grpc.aio.AioRpcError`."""
        return [message async for message in self.inference.Generate(request(**fields), metadata=metadata)]


def request(**fields: Any) -> pb.GenerateRequest:
    """With a prompt unless another input is given. `ids`: token ids; `messages`: (role, content) pairs."""
    if "ids" in fields:
        fields["token_ids"] = pb.TokenIds(ids=fields.pop("ids"))
    if "messages" in fields:
        told = [pb.Message(role=role, content=content) for role, content in fields.pop("messages")]
        fields["conversation"] = pb.Conversation(messages=told)
    if not {"prompt", "token_ids", "conversation"} & fields.keys():
        fields["prompt"] = "hello"
    return pb.GenerateRequest(**fields)


def text_of(messages: list[pb.GenerateResponse], index: int = 0) -> str:
    return "".join(choice.text for message in messages for choice in message.choices if choice.index == index)


def ids_of(messages: list[pb.GenerateResponse], index: int = 0) -> list[int]:
    choices = [choice for message in messages for choice in message.choices if choice.index == index]
    return [token for choice in choices for token in choice.token_ids]


def endings(messages: list[pb.GenerateResponse]) -> dict[int, list[str]]:
    told: dict[int, list[str]] = {}
    for message in messages:
        for choice in message.choices:
            told.setdefault(choice.index, [])
            if choice.finish_reason:
                told[choice.index].append(pb.FinishReason.Name(choice.finish_reason))
    return told


async def failure(client: GrpcDesk, metadata: Any = (), **fields: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(metadata, **fields)
    return caught.value


def trailer(error: grpc.aio.AioRpcError, key: str) -> str | None:
    return dict(error.trailing_metadata()).get(key)


class FrontServer:
    """As Serve's: a factory makes handlers by method name, in the place of those that a service brings."""

    def __init__(self, methods: Methods) -> None:
        self.server = grpc.aio.server()
        self.service_handler_factory: Callable[..., Any] = self._handler
        self._methods = methods

    def add_generic_rpc_handlers(self, _handlers: Any) -> None:
        """Old clients of the server's interface call it besides the one below."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        made = {}
        for name, handler in handlers.items():
            kind = "unary_stream" if handler.response_streaming else "unary_unary"
            front = self.service_handler_factory(service_method=f"/{service}/{name}", streaming_type=kind)
            made[name] = handler._replace(**{kind: front, "response_serializer": None})
        self.server.add_registered_method_handlers(service, made)

    def _handler(self, *, service_method: str, streaming_type: str) -> Any:
        method = getattr(self._methods, service_method.rpartition("/")[2])
        takes_call = "grpc_context" in method.__annotations__

        def responses(message: Any, call: Any) -> Any:
            return method(message, grpc_context=call) if takes_call else method(message)

        async def stream(message: Any, call: Any) -> AsyncIterator[bytes]:
            async for response in responses(message, call):
                yield response.SerializeToString()

        async def unary(message: Any, call: Any) -> bytes:
            data: bytes = (await responses(message, call)).SerializeToString()
            return data

        return stream if streaming_type == "unary_stream" else unary


@asynccontextmanager
async def grpc_desk(
    script: Any = None,
    *,
    fleet: Any = None,
    tracer: Tracer | None = None,
    tell: Tell | None = None,
    text: TextModel = TEXT,
    sessions: SessionOwner | None = None,
    **settings: Any,
) -> AsyncIterator[GrpcDesk]:
    fleet = fleet or FakeFleet(MODEL, script or says("hi there"))
    health = Health(fleet)
    service = Service(
        fleet,
        text,
        ApiSettings(**settings),
        model_name="tiny",
        sessions=sessions,
        tracer=tracer or NoOpTracer(),
        tell=tell,
    )
    methods = Methods(single(service), health)
    front = FrontServer(methods)
    add_services(methods, front)
    server = front.server
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            inference = pb_grpc.InferenceStub(channel)
            yield GrpcDesk(inference, health_pb2_grpc.HealthStub(channel), channel, fleet, health, f"127.0.0.1:{port}")
    finally:
        await server.stop(None)

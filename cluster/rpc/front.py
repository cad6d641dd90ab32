"""What Serve's front runs around each of our RPCs, in its proxy or, behind HAProxy, in the gateway's own process.

Serve registers services through functions that it finds by their path (`grpc_options.grpc_servicer_functions`) and
puts handlers of its own in the place of theirs. `add_services` wraps those handlers, to four ends:

* A cancelled call is heard. Serve's proxy misses a cancel that lands while it sends: the handler is suspended at its
  `yield` then, and nothing tells it. Here it runs in a task of its own, which ends with the call.
* The client's deadline goes along as metadata; without that its value would not reach the gateway.
* The empty message that carries a failure's status through Serve is dropped.
* What is no message is refused as the client's fault (`cluster.rpc.reading`).
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2_grpc

from cluster.headers import DEADLINE
from cluster.rpc.reading import PatientServer, ServerOfMethods, Unreadable, refuse
from protos import inference_pb2_grpc

SERVICER_FUNCTION: Final = "cluster.rpc.front.add_services"
FUNCTION_FOR_THIS_HOST: Final = "cluster.rpc.front.add_services_for_this_host"

MAX_UNSENT: Final = 2
"""Messages of a stream that wait for a client that lags; what comes meanwhile is merged where it is made."""

Handler = Callable[[Any, Any], Any]
HandlerFactory = Callable[..., Handler]


class ServeServer(ServerOfMethods, Protocol):
    """What is used of Serve's gRPC server."""

    service_handler_factory: HandlerFactory


def add_services(servicer: Any, server: ServeServer) -> None:
    """Add Inference and Health to one of Serve's gRPC servers. `servicer` is a stand-in of Serve's."""
    _add(servicer, server, lambda _peer: True)


def add_services_for_this_host(servicer: Any, server: ServeServer) -> None:
    """The same for gateways that nobody shall reach but HAProxy on their host: Serve has them listen everywhere."""
    _add(servicer, server, is_of_this_host)


def is_of_this_host(peer: str) -> bool:
    """Whether a call came over the loopback interface; `peer` as gRPC tells it."""
    kind, _, address = peer.partition(":")
    if kind == "unix":
        return True
    try:
        host = ipaddress.ip_address(unquote(address.rpartition(":")[0]).strip("[]"))
    except ValueError:
        return False
    return host.is_loopback or (host.version == 6 and host.ipv4_mapped is not None and host.ipv4_mapped.is_loopback)


def _add(servicer: Any, server: ServeServer, admits: Callable[[str], bool]) -> None:
    plain = server.service_handler_factory

    def wrapping(**kind: Any) -> Handler:
        handler = plain(**kind)
        wrap = _stream if inspect.isasyncgenfunction(handler) else _unary
        return wrap(handler, admits)

    server.service_handler_factory = wrapping
    try:
        patient = PatientServer(server)
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, patient)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, patient)
    finally:
        server.service_handler_factory = plain


class RecordedCall:
    """Stands for a call's context in front of Serve, which may touch it after the call has ended: that would crash
    gRPC. What the client sent is taken at once, and what is set waits until it is passed on.

    The method names are gRPC's.
    """

    def __init__(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._metadata = [(key, value) for key, value in context.invocation_metadata() or ()]
        left_s = context.time_remaining()
        if left_s is not None:
            self._metadata.append((DEADLINE, str(max(1, int(left_s * 1000)))))
        self._peer = context.peer()
        self._peer_identities = context.peer_identities()
        self._peer_identity_key = context.peer_identity_key()
        self._auth_context = context.auth_context()
        self._code: Any = None
        self._details = ""
        self._trailers: tuple[tuple[str, str | bytes], ...] = ()

    def invocation_metadata(self) -> list[tuple[str, str | bytes]]:
        return self._metadata

    def peer(self) -> str:
        return self._peer

    def peer_identities(self) -> Any:
        return self._peer_identities

    def peer_identity_key(self) -> str | None:
        return self._peer_identity_key

    def auth_context(self) -> Any:
        return self._auth_context

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._trailers

    def set_code(self, code: Any) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self._trailers = tuple(trailing_metadata)

    def pass_on(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Set on the real context what was set here. The call must still be open."""
        if self._code is not None:
            context.set_code(self._code)
        context.set_details(self._details)
        context.set_trailing_metadata(self._trailers)


def _turned_away(request: Any, context: grpc.aio.ServicerContext[Any, Any], admits: Callable[[str], bool]) -> bool:
    """Whether the call is none to go on with; then it has been told why, and is to end without a message."""
    if not admits(context.peer()):
        context.set_code(grpc.StatusCode.PERMISSION_DENIED)
        context.set_details("this port is for the proxy in front of it")
        return True
    if isinstance(request, Unreadable):
        refuse(request, context)
        return True
    return False


def _unary(handler: Handler, admits: Callable[[str], bool]) -> Handler:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        if _turned_away(request, context, admits):
            return b""
        call = RecordedCall(context)
        response: bytes = await handler(request, call)
        call.pass_on(context)
        return response

    return wrapped


def _stream(handler: Handler, admits: Callable[[str], bool]) -> Handler:
    async def wrapped(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        if _turned_away(request, context, admits):
            return
        call = RecordedCall(context)
        messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        room = asyncio.Semaphore(MAX_UNSENT)
        pump = asyncio.create_task(_pump(handler(request, call), messages, room))
        context.add_done_callback(lambda _context: pump.cancel())  # type: ignore[arg-type]  # its result is not read
        while (message := await messages.get()) is not None:
            room.release()
            if message:
                yield message
        await pump
        call.pass_on(context)

    return wrapped


async def _pump(stream: AsyncIterator[bytes], messages: asyncio.Queue[bytes | None], room: asyncio.Semaphore) -> None:
    """Hand on what comes while there is room, then None.

    Cancelled, it makes sure that the handler hears of it, and lets it end; nobody reads then. A cancel that lands
    between two messages is therefore asked for again, to arrive where the handler waits next.
    """
    task = asyncio.current_task()
    assert task is not None
    try:
        async for message in stream:
            if task.cancelling():
                continue
            try:
                await room.acquire()
            except asyncio.CancelledError:
                task.cancel()
                continue
            messages.put_nowait(message)
    finally:
        messages.put_nowait(None)

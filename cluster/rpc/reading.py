"""Messages of clients that are no message: told so, instead of what gRPC says when a deserializer raises.

That would be UNKNOWN, a fault of the server's by its name, with the name of a Python class in its details.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import DecodeError

from planner.errors import InvalidRequest

DETAILS: Final = "the request is no message of this method, or was cut off"


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a request whose bytes are no message."""

    num_bytes: int


class ServerOfMethods(Protocol):
    """What is used of a gRPC server to register services."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None: ...

    def add_registered_method_handlers(self, service_name: str, method_handlers: Any) -> None: ...


class PatientServer:
    """For a generated `add_..._to_server` in the place of `server`: handlers then get `Unreadable` for what they could
    not be given. The method names are gRPC's."""

    def __init__(self, server: ServerOfMethods) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None:
        """Generated code registers each service twice; it is enough to hear of it once."""

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        patient = {
            name: handler._replace(request_deserializer=_reads(handler.request_deserializer))
            for name, handler in method_handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, patient),))
        self._server.add_registered_method_handlers(service_name, patient)


def refuse(request: Unreadable, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Say what is wrong; the call is then to end without a message."""
    context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
    context.set_details(f"{DETAILS} ({request.num_bytes} bytes)")
    context.set_trailing_metadata((("error-code", InvalidRequest.code),))


def _reads(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return Unreadable(len(data))

    return read

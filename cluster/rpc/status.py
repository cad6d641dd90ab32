"""How a gRPC call of ours ends: its status, and the trailers that go with it.

A failure is set on the call and not raised, since Ray Serve would replace its status, lose its trailers or tell a
stack trace.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

import grpc

from cluster.errors import outcome, retry_after_s
from cluster.headers import REQUEST_ID, request_id
from planner.errors import DeadlineExceeded, RaycombError

logger = logging.getLogger(__name__)

MAX_DETAILS_BYTES: Final = 1000
"""They travel percent-encoded, three times as long, in trailers that clients read up to 8 KB of."""

_OUR_FIELDS: Final = {
    "response_format": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "input": "texts",
}
"""Fields of HTTP bodies that have another name here."""

Metadata = Iterable[tuple[str, str | bytes]]


class Call(Protocol):
    """What is used of a call's context, which is gRPC's own or Serve's copy of it."""

    def invocation_metadata(self) -> Metadata: ...

    def set_code(self, code: grpc.StatusCode) -> None: ...

    def set_details(self, details: str) -> None: ...

    def set_trailing_metadata(self, trailing_metadata: Sequence[tuple[str, str]]) -> None: ...


class CallStatus:
    """Owner: the task that serves the call. OK, with the request's id in the trailers, until something fails.

    A failure inside its `with` block is told to the client and ends there; a cancellation goes on.
    """

    def __init__(self, call: Call) -> None:
        self.failed = False
        self._call = call
        self.request_id = request_id("".join(metadata_values(call.invocation_metadata(), REQUEST_ID)[:1]))
        call.set_trailing_metadata([(REQUEST_ID, self.request_id)])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, failure: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        match failure:
            case RaycombError():
                self._fail(failure)
            case TimeoutError():
                self._fail(DeadlineExceeded("the request's deadline passed"))
            case Exception():
                logger.error("request %s failed", self.request_id, exc_info=failure)
                self._fail(RaycombError("the server failed"))
        return self.failed

    def _fail(self, error: RaycombError) -> None:
        self.failed = True
        trailers = [(REQUEST_ID, self.request_id), ("error-code", error.code)]
        param = None if error.param is None else _OUR_FIELDS.get(error.param, error.param)
        if param is not None and param.isascii() and param.isprintable():
            trailers.append(("error-param", param[:100]))
        if (retry := retry_after_s(error)) is not None:
            trailers.append(("retry-after", str(retry)))
        self._call.set_code(grpc.StatusCode[outcome(error).grpc])
        self._call.set_details(short_details(error.message))
        self._call.set_trailing_metadata(trailers)


def metadata_values(metadata: Metadata, key: str) -> list[str]:
    """All texts that were sent under `key`, in order."""
    return [value for name, value in metadata if name == key and isinstance(value, str)]


def short_details(message: str) -> str:
    """The message, cut to what fits into trailers."""
    data = message.encode()
    if len(data) <= MAX_DETAILS_BYTES:
        return message
    return data[:MAX_DETAILS_BYTES].decode(errors="ignore") + "..."

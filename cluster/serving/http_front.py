"""What Serve's HTTP servers run around each request, in its proxy or, behind HAProxy, in the gateway's own process.

Serve reads some headers before the application sees a request, and fails where they are no text. Some are orders to
Serve that are not the client's to give: one turns off that its leaving is noticed. And Serve bounds no headers; here,
with all of them read, at least nothing is done with more than `MAX_HEADER_BYTES`.

Nor is anything done for a client that has left already. Where clients ask and hang up faster than a gateway can take it
in, those who wait would wait behind all of them: a flood of 700 a second left others 1 in 60 of their requests, and
nothing for a quarter of a minute after it. Now it is a fifth, and two seconds.
"""

from __future__ import annotations

import asyncio
import json
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import error_envelope
from cluster.headers import REQUEST_ID
from cluster.web.answer_response import error_response, json_response
from planner.errors import InvalidRequest

MAX_HEADER_BYTES: Final = 32 * 1024
SESSION_ID: Final = "x-session-id"
ORDERS_TO_SERVE: Final = frozenset(
    {b"x-request-disconnect-disabled", b"x-request-timeout-seconds", b"serve-multiplexed-model-id"}
)
"""With `-` for `_`, which are one to Serve."""


def middlewares() -> list[Middleware]:
    """Serve calls it once for each of its HTTP servers (RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH)."""
    return [Middleware(HeaderGuard)]


class HeaderGuard:
    """Lets Serve see requests of clients that are still there, with headers that it can read and not too many."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await asyncio.sleep(0)  # a client that hung up behind its request is heard of now
        if has_left(receive):
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if num_bytes > MAX_HEADER_BYTES:
            message = f"headers of {num_bytes} bytes; at most {MAX_HEADER_BYTES} are taken"
            value = error_envelope(message, "invalid_request_error", code="headers_too_large")
            await json_response(json.dumps(value).encode(), 431, {"connection": "close"})(scope, receive, send)
            return
        if any(name == SESSION_ID.encode() and not value.isascii() for name, value in headers):
            refusal = InvalidRequest(f"{SESSION_ID} must be ASCII", param=SESSION_ID)
            await error_response(refusal)(scope, receive, send)
            return
        scope["headers"] = [(name, value) for name, value in headers if not _is_dropped(name, value)]
        await self._app(scope, receive, send)


def has_left(receive: Receive) -> bool:
    """Whether uvicorn knows that the client is gone, which it tells the application only behind the whole body. Another
    server's requests are all taken for present."""
    return bool(getattr(getattr(receive, "__self__", None), "disconnected", False))


def _is_dropped(name: bytes, value: bytes) -> bool:
    """An id that cannot be echoed is no id, and another is made."""
    if name == REQUEST_ID.encode():
        return not value.isascii()
    return name.replace(b"_", b"-") in ORDERS_TO_SERVE

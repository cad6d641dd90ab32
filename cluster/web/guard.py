"""What every HTTP request passes first: a request id, the key, and a net under what nobody foresaw.

A plain ASGI middleware: it never touches bodies, so streams and disconnects pass through it untouched.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.access.key_ring import KeyRing
from cluster.headers import REQUEST_ID, request_id
from cluster.telemetry.gateway_meter import GatewayMeter
from cluster.telemetry.request_record import RECORD, RequestRecords
from cluster.web.answer_response import error_response
from planner.errors import RateLimited, RaycombError, Unauthenticated

logger = logging.getLogger(__name__)

METERED_PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings"})
"""Where a key's limits hold."""


class Guard:
    """Outermost but for CORS. `tells_id`: whether answers get the request id from here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: KeyRing,
        open_paths: frozenset[str],
        tells_id: bool,
        meter: GatewayMeter,
        records: RequestRecords,
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._tells_id = tells_id
        self._meter = meter
        self._records = records

    def _admitted(self, scope: Scope, headers: Headers) -> AbstractContextManager[None]:
        """Raises `Unauthenticated`, and entering it `RateLimited`."""
        if _path(scope) in self._open_paths:
            return nullcontext()
        key = self._keys.find(headers.get("authorization", ""))
        return nullcontext() if key is None or not _asks_for_tokens(scope) else key.admitted()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        own_id = request_id(headers.get(REQUEST_ID, ""))
        if not _asks_for_tokens(scope):
            await self._serve(scope, receive, send, headers, own_id)
            return
        with self._records.request(f"POST {_path(scope)}", own_id, lambda name: headers.get(name, "")) as record:
            scope[RECORD] = record
            await self._serve(scope, receive, send, headers, own_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers, own_id: str) -> None:
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._tells_id:
                    MutableHeaders(scope=message)[REQUEST_ID] = own_id
                if RECORD in scope:
                    scope[RECORD].note_status(message["status"])
            await send(message)

        try:
            with self._admitted(scope, headers):
                await self._app(scope, receive, send_with_id)
        except (Unauthenticated, RateLimited) as refusal:
            self._meter.note_failure(refusal)
            if RECORD in scope:
                scope[RECORD].note_failure(refusal)
            await error_response(refusal)(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", own_id)
            if started:
                raise
            await error_response(RaycombError("the server failed"))(scope, receive, send_with_id)


def _asks_for_tokens(scope: Scope) -> bool:
    return scope["method"] == "POST" and _path(scope) in METERED_PATHS


def _path(scope: Scope) -> str:
    """The path below the prefix that the application is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

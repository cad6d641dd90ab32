"""What every HTTP request passes first: a request id, the key, and a net under what nobody foresaw.

A plain ASGI middleware: it never touches bodies, so streams and disconnects pass through it untouched.
"""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from collections.abc import Iterable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.answer_response import error_response
from planner.errors import RaycombError, Unauthenticated

logger = logging.getLogger(__name__)

REQUEST_ID: Final = "x-request-id"
_GOOD_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")


class Guard:
    """Outermost but for CORS. `keys` empty: no key is asked for."""

    def __init__(self, app: ASGIApp, *, keys: Iterable[str], open_paths: frozenset[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        if not self._may_pass(scope, headers):
            refusal = Unauthenticated("a valid API key is needed: Authorization: Bearer <key>")
            await error_response(refusal)(scope, receive, send_with_id)
            return
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if started:
                raise
            await error_response(RaycombError("the server failed"))(scope, receive, send_with_id)

    def _may_pass(self, scope: Scope, headers: Headers) -> bool:
        if not self._keys or _path(scope) in self._open_paths:
            return True
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode()
        matches = [hmac.compare_digest(given, own) for own in self._keys]
        return kind.lower() == "bearer" and any(matches)


def _path(scope: Scope) -> str:
    """The path below the prefix that the application is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))

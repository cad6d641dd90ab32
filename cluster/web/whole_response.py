"""An HTTP answer that is one JSON text, made by work that ends when its client leaves or its deadline passes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.headers import Terms
from cluster.telemetry.gateway_meter import RequestMeter
from cluster.web.answer_response import error_response, json_response, while_connected
from planner.errors import DeadlineExceeded, RaycombError

logger = logging.getLogger(__name__)


class WholeResponse(Response):
    """Runs `work`, whose result is the body; it is cancelled where nobody waits for that any more."""

    def __init__(self, work: Callable[[], Awaitable[bytes]], meter: RequestMeter, terms: Terms) -> None:
        super().__init__()
        self._work = work
        self._meter = meter
        self._terms = terms

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await while_connected(receive, self._run(scope, receive, send)):
            logger.debug("client gone (499)")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._meter:
                async with asyncio.timeout(self._terms.patience_s):
                    body = await self._work()
        except TimeoutError:
            response = error_response(DeadlineExceeded("the request's deadline passed"))
        except RaycombError as failure:
            response = error_response(failure)
        else:
            response = json_response(body)
        await response(scope, receive, send)

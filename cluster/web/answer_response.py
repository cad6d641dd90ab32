"""Sends an answer as an ASGI response, whole or as server-sent events, for as long as its client stays.

Written against ASGI itself so that three things are exact: a refusal gets its own status because nothing is sent
before the first news; the first token is written the moment it comes; and a client that leaves, read or unread, ends
every generation of its request. While a client lags, `send` waits and the news merge in the fleet, so no buffer grows.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from itertools import chain

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.answers.answer import Answer
from cluster.answers.choice import Piece
from cluster.errors import envelope, outcome, retry_after_s
from cluster.headers import Terms
from cluster.web.telling import Telling
from planner.errors import BodyTooSlow, DeadlineExceeded, RaycombError

logger = logging.getLogger(__name__)

_LOOK_S = 60.0  # nothing is told before the end, so it matters to nobody


@dataclass(frozen=True, slots=True)
class Delivery:
    """How an answer is sent, and until when. Times in seconds."""

    stream: bool
    keepalive_s: float
    terms: Terms


def error_response(error: RaycombError) -> Response:
    """The error as OpenAI's JSON, with its status and, where it helps, Retry-After."""
    retry = retry_after_s(error)
    headers = {} if retry is None else {"retry-after": str(retry)}
    if outcome(error).status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, BodyTooSlow):
        headers["connection"] = "close"  # or the rest of the body would hold it
    return json_response(json.dumps(envelope(error), ensure_ascii=False).encode(), outcome(error).status, headers)


def json_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response whose JSON is already written."""
    return Response(body, status, headers, media_type="application/json")


class AnswerResponse(Response):
    """Runs an answer and sends it. Owner of the answer from here on."""

    def __init__(self, answer: Answer, telling: Telling, delivery: Delivery) -> None:
        super().__init__()
        self._answer = answer
        self._telling = telling
        self._delivery = delivery
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await while_connected(receive, self._run(scope, receive, send)):
            logger.debug("client gone (499)")

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        error: RaycombError | None = None
        ending = b""
        try:
            with self._answer.meter:
                async with asyncio.timeout(self._delivery.terms.patience_s):
                    ending = await (
                        self._send_events(send) if self._delivery.stream else _whole(self._answer, self._telling)
                    )
        except TimeoutError:
            error = DeadlineExceeded("the request's deadline passed")
        except RaycombError as failure:
            error = failure
        finally:
            await self._answer.close()
        # Outside the deadline: a response that has begun to end cannot become another one.
        if error is not None and not self._streaming:
            await error_response(error)(scope, receive, send)
        elif error is not None:
            await self._send_event_bytes(send, self._telling.failure(error), more=False)
        elif self._delivery.stream:
            await self._send_event_bytes(send, ending, more=False)
        else:
            await json_response(ending)(scope, receive, send)

    async def _send_events(self, send: Send) -> bytes:
        """Send the answer as it grows; returns the events that close the stream."""
        pieces = await self._answer.start()
        while not self._answer.finished:
            news = await self._answer.next(self._delivery.keepalive_s)
            pieces += news
            events = await self._events(pieces)
            await self._send_event_bytes(send, events if news else events + b": still here\n\n")
            pieces = []
        return await self._events(pieces) + self._telling.closing(self._answer.counts())

    async def _events(self, pieces: list[Piece]) -> bytes:
        return await self._answer.written(pieces, lambda: self._telling.events(pieces))

    async def _send_event_bytes(self, send: Send, events: bytes, *, more: bool = True) -> None:
        if not self._streaming:
            headers = {"cache-control": "no-cache", "x-accel-buffering": "no", "content-type": "text/event-stream"}
            pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
            await send({"type": "http.response.start", "status": 200, "headers": pairs})
            self._streaming = True
        if events or not more:
            await _send_body(send, events, more=more)


async def whole_answer(answer: Answer, telling: Telling) -> bytes:
    """Run an answer to its end, tell it as one JSON text, and close it in any case. Raises `RaycombError`."""
    try:
        with answer.meter:
            return await _whole(answer, telling)
    finally:
        await answer.close()


async def _whole(answer: Answer, telling: Telling) -> bytes:
    choices: list[list[Piece]] = [[] for _ in range(answer.num_choices)]
    for piece in await answer.start():
        choices[piece.index].append(piece)
    while not answer.finished:
        for piece in await answer.next(_LOOK_S):
            choices[piece.index].append(piece)
    pieces = chain.from_iterable(choices)
    return await answer.written(pieces, lambda: telling.whole(answer.best(choices), answer.counts()), whole=True)


async def while_connected(receive: Receive, work: Coroutine[None, None, None]) -> bool:
    """Run `work` to its end, or cancel it as soon as the client disconnects. Returns whether it ran to its end."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        ran_to_its_end = working.done()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)
    if ran_to_its_end:
        working.result()
    return ran_to_its_end


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})

"""An answer that goes on with a session: what it brings becomes part of the session's history."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cluster.answers.answer import Answer
from cluster.answers.choice import Piece, TextRules
from cluster.answers.requests import ChoicePlan
from cluster.language.side_threads import SideThreads
from cluster.language.text import TextModel
from cluster.routing.fleet import Fleet
from cluster.sessions.desk import Turn
from cluster.telemetry.gateway_meter import RequestMeter
from planner.errors import DeadlineExceeded, RequestFailed, Unavailable, UnknownSession

logger = logging.getLogger(__name__)


class SessionAnswer(Answer):
    """Owner: the task that serves the HTTP request. Of one prompt, with one choice."""

    def __init__(
        self,
        fleet: Fleet,
        text: TextModel,
        plans: Sequence[ChoicePlan],
        rules: TextRules,
        meter: RequestMeter,
        threads: SideThreads,
        turn: Turn,
        *,
        scored: bool,
    ) -> None:
        super().__init__(fleet, text, plans, rules, meter, threads, scored=scored)
        self._turn = turn

    async def next(self, timeout_s: float) -> list[Piece]:
        """As an answer's; raises `UnknownSession` when the session was closed.

        The last pieces come when the session has them: its client may go on with it at once, at any gateway."""
        try:
            pieces = await super().next(timeout_s)
        except DeadlineExceeded:
            raise  # the client's own wish, and no fault of a worker
        except RequestFailed:
            self._turn.fail()
            raise
        for piece in pieces:
            self._turn.take(piece.tokens)
        if self._turn.lost or (self.finished and not await self._turn.end()):
            raise UnknownSession("session is not open", param="session_id")
        return pieces

    async def close(self) -> None:
        await super().close()
        try:
            await self._turn.end()
        except Unavailable as error:
            logger.warning("a client was answered before its session: %s", error)

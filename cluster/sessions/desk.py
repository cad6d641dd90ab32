"""A gateway's side of sessions: it asks their owner, and holds them on lease while it serves generations on them.

What a generation brought is handed back until the owner has it or says that the session is lost, also when the client
left meanwhile and while the owner cannot be reached. Calls that must not be broken off with the request they serve run
in tasks of their own, outside the request's context.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from cluster.sessions.histories import Begun, SessionView
from cluster.sessions.owner import SessionOwner
from planner.errors import RequestRefused, Unavailable

logger = logging.getLogger(__name__)

RENEW_S: Final = 0.5
"""Also how long it takes at most until a gateway hears that another one has closed a session."""

AGAIN_S: Final = 0.2
KEPT_WITHIN_S: Final = 30.0
"""What serves a client waits so long for the owner to have what was generated; the desk goes on trying."""

GONE_WITHIN_S: Final = 5.0

T = TypeVar("T")


class Turn:
    """One generation on a session. Owner: the task that serves it, which must `end` it in any case.

    What it brought is kept when it ends; a turn that brought no token leaves the session as it was. `history`: token
    ids of what came before. `lost`: the session was closed meanwhile, or somebody else has it.
    """

    def __init__(self, begun: Begun, session_id: str, hand_back: Callable[[Turn], asyncio.Task[bool]]) -> None:
        self.id = begun.turn_id
        self.session_id = session_id
        self.history: Sequence[int] = begun.history
        self.generated: list[int] = []
        self.failed = False
        self.lost = False
        self._hand_back = hand_back
        self._ending: asyncio.Task[bool] | None = None

    def take(self, tokens: Sequence[int]) -> None:
        self.generated += tokens

    def fail(self) -> None:
        """The generation failed on the side of the workers."""
        self.failed = True

    async def end(self) -> bool:
        """Whether the session has what was generated: not where it is lost. Harmless the second time.

        Raises `Unavailable` where the owner has not said so in time; it will hear of it yet.
        """
        if self._ending is None:
            self._ending = self._hand_back(self)
        try:
            async with asyncio.timeout(KEPT_WITHIN_S):
                return await asyncio.shield(self._ending)
        except TimeoutError as error:
            raise Unavailable("what was generated could not be handed to the session yet") from error


class SessionDesk:
    """Owner: a gateway; lives on its event loop."""

    def __init__(self, owner: SessionOwner) -> None:
        self._owner = owner
        self._turns: WeakValueDictionary[str, Turn] = WeakValueDictionary()  # one that nobody holds is renewed no more
        self._tasks: set[asyncio.Task[Any]] = set()
        self._renewing: asyncio.Task[None] | None = None

    async def open(self, account: str) -> SessionView:
        return await self._owner.open(account)

    async def get(self, session_id: str, account: str) -> SessionView:
        return await self._owner.get(session_id, account)

    async def of(self, account: str) -> list[SessionView]:
        return await self._owner.of(account)

    async def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        return await self._owner.fork(session_id, account, at)

    async def close(self, session_id: str, account: str) -> None:
        """Also ends the generation on it, here with its next news and at another gateway a moment later."""
        await self._owner.close(session_id, account)
        for turn in list(self._turns.values()):
            if turn.session_id == session_id:
                turn.lost = True

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Turn:
        """As the owner's. Where whoever asks is cancelled meanwhile, the session is given back."""
        beginning = self._own(self._begin(session_id, account, delta, max_tokens, context))
        try:
            return await asyncio.shield(beginning)
        except asyncio.CancelledError:
            self._own(_give_up(beginning))
            raise

    async def shut(self) -> None:
        """Hand back what can be in a few seconds; the lease of the rest passes."""
        handed = {task for task in self._tasks if task is not self._renewing}
        if handed:
            await asyncio.wait(handed, timeout=GONE_WITHIN_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Turn:
        begun = await self._owner.begin(session_id, account, delta, max_tokens, context)
        turn = self._turns[begun.turn_id] = Turn(begun, session_id, lambda turn: self._own(self._hand_back(turn)))
        if self._renewing is None:
            self._renewing = self._own(self._renew())
        return turn

    async def _hand_back(self, turn: Turn) -> bool:
        try:
            while True:
                try:
                    return await self._owner.end(turn.id, turn.generated, failed=turn.failed)
                except Unavailable as error:
                    logger.warning("a session waits for what was generated on it: %s", error)
                await asyncio.sleep(AGAIN_S)
        finally:
            self._turns.pop(turn.id, None)

    async def _renew(self) -> None:
        """For as long as there are turns. A renewal that fails is followed by the next one, well within the lease."""
        try:
            while True:
                await asyncio.sleep(RENEW_S)
                if not self._turns:
                    return
                try:
                    lost = await self._owner.renew(list(self._turns))
                except Unavailable as error:
                    logger.warning("the leases of sessions were not renewed: %s", error)
                    continue
                for turn_id in lost:
                    if (turn := self._turns.get(turn_id)) is not None:
                        turn.lost = True
        finally:
            self._renewing = None

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, context=Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _give_up(beginning: asyncio.Task[Turn]) -> None:
    try:
        turn = await beginning
        await turn.end()
    except RequestRefused:
        return  # there is nothing to give back, or the desk goes on giving it back

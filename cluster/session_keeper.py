"""The owner of a fleet's sessions: a Serve deployment of one replica, and how gateways ask it. Free of Ray.

Sessions live in its memory: when it ends, all of them are unknown from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

from cluster.sessions import Begun, SessionLimits, Sessions, SessionView
from planner.errors import RequestRefused, Unavailable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

ANSWER_WITHIN_S: Final = 8.0
"""Below the lease, so that a renewal that fails leaves time for another."""

P = ParamSpec("P")
T = TypeVar("T")


def _refusals_told(
    method: Callable[Concatenate[SessionKeeper, P], T],
) -> Callable[Concatenate[SessionKeeper, P], Coroutine[Any, Any, T | RequestRefused]]:
    """Gives what the method raises as a refusal: Serve would log what is raised, and wrap it."""

    @wraps(method)
    async def told(keeper: SessionKeeper, /, *args: P.args, **kwargs: P.kwargs) -> T | RequestRefused:
        try:
            return method(keeper, *args, **kwargs)
        except RequestRefused as refusal:
            return refusal

    return told


class SessionKeeper:
    """Serve owns it and calls every method on one event loop. Each is that of `cluster.sessions.Sessions`."""

    def __init__(self, limits: SessionLimits) -> None:
        self._sessions = Sessions(limits)

    @_refusals_told
    def open(self, account: str) -> SessionView:
        return self._sessions.open(account)

    @_refusals_told
    def get(self, session_id: str, account: str) -> SessionView:
        return self._sessions.get(session_id, account)

    @_refusals_told
    def of(self, account: str) -> list[SessionView]:
        return self._sessions.of(account)

    @_refusals_told
    def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        return self._sessions.fork(session_id, account, at)

    @_refusals_told
    def close(self, session_id: str, account: str) -> None:
        self._sessions.close(session_id, account)

    @_refusals_told
    def begin(self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int) -> Begun:
        return self._sessions.begin(session_id, account, delta, max_tokens, context)

    @_refusals_told
    def renew(self, turn_ids: Sequence[str]) -> list[str]:
        return self._sessions.renew(turn_ids)

    @_refusals_told
    def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        return self._sessions.end(turn_id, generated, failed=failed)


class RemoteOwner:
    """A `cluster.session_owner.SessionOwner`: the keeper behind its handle. Owner: a gateway, on its event loop.

    `faults`: what a call by the handle raises where the keeper is not there.
    """

    def __init__(
        self, keeper: DeploymentHandle[Any], faults: tuple[type[Exception], ...], patience_s: float = ANSWER_WITHIN_S
    ) -> None:
        self._keeper = keeper
        self._faults: tuple[type[Exception], ...] = (TimeoutError, *faults)
        self._patience_s = patience_s

    async def open(self, account: str) -> SessionView:
        view: SessionView = await self._answer(self._keeper.open.remote(account))
        return view

    async def get(self, session_id: str, account: str) -> SessionView:
        view: SessionView = await self._answer(self._keeper.get.remote(session_id, account))
        return view

    async def of(self, account: str) -> list[SessionView]:
        views: list[SessionView] = await self._answer(self._keeper.of.remote(account))
        return views

    async def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        view: SessionView = await self._answer(self._keeper.fork.remote(session_id, account, at))
        return view

    async def close(self, session_id: str, account: str) -> None:
        await self._answer(self._keeper.close.remote(session_id, account))

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Begun:
        asked = self._keeper.begin.remote(session_id, account, delta, max_tokens, context)
        begun: Begun = await self._answer(asked)
        return begun

    async def renew(self, turn_ids: Sequence[str]) -> list[str]:
        lost: list[str] = await self._answer(self._keeper.renew.remote(turn_ids))
        return lost

    async def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        is_kept: bool = await self._answer(self._keeper.end.remote(turn_id, generated, failed=failed))
        return is_kept

    async def _answer(self, response: Awaitable[Any]) -> Any:
        """What the keeper says. Raises its refusals, and `Unavailable` where it does not answer."""
        try:
            async with asyncio.timeout(self._patience_s):
                told = await response
        except self._faults as error:
            raise Unavailable(f"the owner of the sessions does not answer: {type(error).__name__}") from error
        if isinstance(told, RequestRefused):
            raise told
        return told

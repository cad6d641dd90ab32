"""Who keeps the sessions of a service, as its gateways see it: there is one owner, and each gateway asks it.

`LocalOwner` is for an application that is its own whole service; `cluster.sessions.keeper` is what a fleet has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cluster.api_settings import ApiSettings
from cluster.sessions.histories import Begun, SessionLimits, Sessions, SessionView


class SessionOwner(Protocol):
    """What can be asked. Everything raises `RequestRefused` as `cluster.sessions.histories.Sessions` does, which says
    what each means, and `Unavailable` where the owner does not answer: what was asked may have been done, or not.
    """

    async def open(self, account: str) -> SessionView: ...

    async def get(self, session_id: str, account: str) -> SessionView: ...

    async def of(self, account: str) -> list[SessionView]: ...

    async def fork(self, session_id: str, account: str, at: int | None) -> SessionView: ...

    async def close(self, session_id: str, account: str) -> None: ...

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Begun: ...

    async def renew(self, turn_ids: Sequence[str]) -> list[str]: ...

    async def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool: ...


def session_limits(settings: ApiSettings) -> SessionLimits:
    return SessionLimits(settings.max_sessions, settings.max_sessions_per_key, settings.session_idle_s)


class LocalOwner:
    """A `SessionOwner` in the process that asks. Owner: the gateway, on its event loop."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def open(self, account: str) -> SessionView:
        return self._sessions.open(account)

    async def get(self, session_id: str, account: str) -> SessionView:
        return self._sessions.get(session_id, account)

    async def of(self, account: str) -> list[SessionView]:
        return self._sessions.of(account)

    async def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        return self._sessions.fork(session_id, account, at)

    async def close(self, session_id: str, account: str) -> None:
        self._sessions.close(session_id, account)

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Begun:
        return self._sessions.begin(session_id, account, delta, max_tokens, context)

    async def renew(self, turn_ids: Sequence[str]) -> list[str]:
        return self._sessions.renew(turn_ids)

    async def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        return self._sessions.end(turn_id, generated, failed=failed)


class ScopedOwner:
    """A `SessionOwner` of some of another one's sessions: those of one model, where a service has several."""

    def __init__(self, owner: SessionOwner, scope: str) -> None:
        """`scope`: what tells them from others; "" for all that have none."""
        self._owner = owner
        self._scope = scope

    async def open(self, account: str) -> SessionView:
        return await self._owner.open(self._scoped(account))

    async def get(self, session_id: str, account: str) -> SessionView:
        return await self._owner.get(session_id, self._scoped(account))

    async def of(self, account: str) -> list[SessionView]:
        return await self._owner.of(self._scoped(account))

    async def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        return await self._owner.fork(session_id, self._scoped(account), at)

    async def close(self, session_id: str, account: str) -> None:
        await self._owner.close(session_id, self._scoped(account))

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Begun:
        return await self._owner.begin(session_id, self._scoped(account), delta, max_tokens, context)

    async def renew(self, turn_ids: Sequence[str]) -> list[str]:
        return await self._owner.renew(turn_ids)

    async def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        return await self._owner.end(turn_id, generated, failed=failed)

    def _scoped(self, account: str) -> str:
        return f"{self._scope}\0{account}" if self._scope else account

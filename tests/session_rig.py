"""Owners of sessions for tests: one in the process that asks, and a keeper behind real gRPC that may go and come."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.sessions.histories import SessionLimits, Sessions
from cluster.sessions.owner import LocalOwner, SessionOwner
from cluster.sessions.remote import ANSWER_WITHIN_S, RemoteOwner
from cluster.sessions.server import SessionServer

LIMITS = SessionLimits(max_sessions=4096, max_per_account=1024, idle_s=600.0)
SECRET = "a secret of these tests"


class Keeper:
    """Listens while it is there. `owner` makes a gateway's view of it, which hears of each new address."""

    def __init__(self, limits: SessionLimits) -> None:
        self._limits = limits
        self._sessions = Sessions(limits)
        self._server: SessionServer | None = None
        self._owners: list[RemoteOwner] = []
        self.address = ""

    async def start(self) -> None:
        self._server = SessionServer(self._sessions, SECRET, "127.0.0.1")
        self.address = await self._server.start()
        for owner in self._owners:
            owner.set_address(self.address)

    async def stop(self) -> None:
        """Nobody is there then, and gateways do not know it yet."""
        if self._server is not None:
            await self._server.stop()
            self._server = None

    async def replace(self) -> None:
        """By one that knows no session, as Serve does with one that died."""
        await self.stop()
        self._sessions = Sessions(self._limits)
        await self.start()

    def owner(self, *, secret: str = SECRET, patience_s: float = ANSWER_WITHIN_S) -> RemoteOwner:
        made = RemoteOwner(secret, patience_s=patience_s)
        made.set_address(self.address)
        self._owners.append(made)
        return made

    async def close(self) -> None:
        await self.stop()
        for owner in self._owners:
            await owner.shut()


@asynccontextmanager
async def keeper(limits: SessionLimits = LIMITS) -> AsyncIterator[Keeper]:
    made = Keeper(limits)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def owner_of_kind(kind: str, limits: SessionLimits = LIMITS) -> AsyncIterator[SessionOwner]:
    """`kind`: "local" or "remote"."""
    if kind == "local":
        yield LocalOwner(Sessions(limits))
        return
    async with keeper(limits) as kept:
        yield kept.owner()

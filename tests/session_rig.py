"""Both owners of sessions for tests, and a handle to a keeper as Serve's: what crosses it is pickled."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.session_keeper import ANSWER_WITHIN_S, RemoteOwner, SessionKeeper
from cluster.session_owner import LocalOwner, SessionOwner
from cluster.sessions import SessionLimits, Sessions
from tests.fake_fleet import open_gate

LIMITS = SessionLimits(max_sessions=4096, max_per_account=1024, idle_s=600.0)


class KeeperGoneError(Exception):
    """Stands for what Ray raises where an actor has died."""


class KeeperHandle:
    """Asks `keeper` once `gate` is open; `is_gone`: nobody is there. `calls` are the names of what was asked."""

    def __init__(self, limits: SessionLimits = LIMITS) -> None:
        self.limits = limits
        self.keeper = SessionKeeper(limits)
        self.is_gone = False
        self.gate = open_gate()
        self.calls: list[str] = []

    def replace(self) -> None:
        """As Serve does with one that died."""
        self.keeper = SessionKeeper(self.limits)
        self.is_gone = False

    def __getattr__(self, name: str) -> _Method:
        return _Method(lambda *args, **kwargs: self._ask(name, args, kwargs))

    async def _ask(self, name: str, args: Any, kwargs: Any) -> Any:
        self.calls.append(name)
        sent = pickle.dumps((args, kwargs))
        await self.gate.wait()
        if self.is_gone:
            raise KeeperGoneError
        args, kwargs = pickle.loads(sent)
        return pickle.loads(pickle.dumps(await getattr(self.keeper, name)(*args, **kwargs)))


class _Method:
    def __init__(self, remote: Callable[..., Awaitable[Any]]) -> None:
        self.remote = remote


def remote_owner(handle: KeeperHandle, patience_s: float = ANSWER_WITHIN_S) -> RemoteOwner:
    return RemoteOwner(handle, (KeeperGoneError,), patience_s)  # type: ignore[arg-type]  # stands for Serve's


def owners(limits: SessionLimits = LIMITS) -> dict[str, SessionOwner]:
    """One of each kind, by name."""
    return {"local": LocalOwner(Sessions(limits)), "remote": remote_owner(KeeperHandle(limits))}

"""Sessions: token histories that clients extend, fork at a token, and close.

A session is its history and nothing else. The cells of that history are resident where it last ran, and are found again
there like those of any other prompt, to the token: so a fork copies no cell, and a session outlives its worker, at the
price of a prefill elsewhere. The last token that was generated is pending: it is in the history, but no position holds
it before the next generation feeds it.

Not for running anything: `cluster.session_answer` does.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from planner.errors import InvalidRequest, QueueFull, SessionBusy, SessionFailed, UnknownSession


class SessionState(Enum):
    """IDLE takes a generation, BUSY has one, FAILED had one that failed and takes no more."""

    IDLE = "idle"
    BUSY = "busy"
    FAILED = "failed"


@dataclass(slots=True)
class Session:
    """Owner: `Sessions`. `account` is whose it is. `used_at`: on the monotonic clock; `created`: in Unix time."""

    account: str
    tokens: list[int] = field(default_factory=list)
    has_pending: bool = False
    state: SessionState = SessionState.IDLE
    id: str = field(default_factory=lambda: f"session-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    used_at: float = field(default_factory=time.monotonic)
    closed: bool = False

    @property
    def position(self) -> int:
        """The position that the next token takes: how many tokens the history has, without the pending one."""
        return len(self.tokens) - self.has_pending


class Turn:
    """One generation on a session. Owner: the task that serves it.

    What it brings is kept when it ends; a turn that brought no token leaves the session as it was.
    """

    def __init__(self, session: Session, delta: Sequence[int]) -> None:
        self._session = session
        self._delta = list(delta)
        self._generated: list[int] = []
        self._failed = False
        self._over = False

    @property
    def closed(self) -> bool:
        """Whether the session was closed meanwhile."""
        return self._session.closed

    def take(self, tokens: Sequence[int]) -> None:
        self._generated += tokens

    def fail(self) -> None:
        """The generation failed on the side of the workers."""
        self._failed = True

    def end(self) -> None:
        """Harmless the second time."""
        if self._over:
            return
        self._over = True
        session = self._session
        session.used_at = time.monotonic()
        session.state = SessionState.FAILED if self._failed else SessionState.IDLE
        if self._generated:
            session.tokens += self._delta + self._generated
            session.has_pending = True


class Sessions:
    """All sessions of a gateway; an idle one is forgotten after `idle_s`. Owner: the gateway, on its event loop."""

    def __init__(self, *, max_sessions: int, max_per_account: int, idle_s: float) -> None:
        self._max_sessions = max_sessions
        self._max_per_account = max_per_account
        self._idle_s = idle_s
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, account: str) -> Session:
        """A new session without tokens. Raises `QueueFull` where there are too many."""
        return self._add(Session(account))

    def get(self, session_id: str, account: str) -> Session:
        """Raises `UnknownSession`, also for a session of somebody else."""
        self._expire()
        session = self._sessions.get(session_id)
        if session is None or session.account != account:
            raise UnknownSession("session is not open", param="session_id")
        return session

    def of(self, account: str) -> list[Session]:
        """The account's sessions, oldest first."""
        self._expire()
        return [session for session in self._sessions.values() if session.account == account]

    def fork(self, session: Session, at: int | None) -> Session:
        """A session of its own with the first `at` tokens, or with the whole history, the pending token included.

        Raises `InvalidRequest` where `at` is not in [0, position], and `SessionFailed`, `QueueFull`.
        """
        if at is not None and not 0 <= at <= session.position:
            raise InvalidRequest(
                f"session position is invalid: at must lie in [0, {session.position}], not {at}", param="at"
            )
        if session.state is SessionState.FAILED:
            raise SessionFailed("session cannot continue after an executor failure")
        if at is None:
            return self._add(Session(session.account, list(session.tokens), session.has_pending))
        return self._add(Session(session.account, session.tokens[:at]))

    def begin(self, session: Session, delta: Sequence[int], max_tokens: int | None, context: int) -> Turn:
        """Take the session for one generation behind `delta`. A refusal changes nothing.

        Raises `InvalidRequest`, `SessionFailed` or `SessionBusy`, in the order in which they are looked for.
        """
        if max_tokens == 0:
            raise InvalidRequest("max_new_tokens must be greater than zero", param="max_tokens")
        if not delta:
            raise InvalidRequest("generation delta must not be empty", param="prompt")
        if len(session.tokens) + len(delta) >= context:
            raise InvalidRequest(
                f"generation delta exceeds the session position range: {len(delta)} tokens behind "
                f"{len(session.tokens)}, and the context is {context}",
                param="prompt",
            )
        if session.state is SessionState.FAILED:
            raise SessionFailed("session cannot continue after an executor failure")
        if session.state is SessionState.BUSY:
            raise SessionBusy("session already has an active generation")
        session.state = SessionState.BUSY
        self._sessions.move_to_end(session.id)
        return Turn(session, delta)

    def close(self, session: Session) -> None:
        """Forget it; a generation on it ends at its next news."""
        session.closed = True
        del self._sessions[session.id]

    def _add(self, session: Session) -> Session:
        mine = len(self.of(session.account))
        if mine >= self._max_per_account or len(self._sessions) >= self._max_sessions:
            most = min(self._max_per_account, self._max_sessions)
            raise QueueFull(f"{mine} sessions are open; at most {most} may be: close one", retry_after_s=self._idle_s)
        self._sessions[session.id] = session
        return session

    def _expire(self) -> None:
        """Those that were not used for long stand in front; a busy one is used."""
        horizon = time.monotonic() - self._idle_s
        for session in list(self._sessions.values()):
            if session.used_at > horizon:
                return
            if session.state is not SessionState.BUSY:
                self.close(session)

"""Sessions: token histories that clients extend, fork at a token, and close.

A session is its history and nothing else. The cells of that history are resident where it last ran, and are found again
there like those of any other prompt, to the token: so a fork copies no cell, and a session outlives its worker, at the
price of a prefill elsewhere. The last token that was generated is pending: it is in the history, but no position holds
it before the next generation feeds it.

A generation takes its session on a lease, which whoever serves it renews: a gateway that dies leaves no session busy.

Not for running anything: `cluster.sessions.answer` does. Nor for reaching it: `cluster.sessions.owner`.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from planner.errors import InvalidRequest, QueueFull, SessionBusy, SessionFailed, UnknownSession


class SessionState(Enum):
    """IDLE takes a generation, BUSY has one, FAILED had one that failed and takes no more."""

    IDLE = "idle"
    BUSY = "busy"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SessionView:
    """What is told of a session. `created`: in Unix time.

    `position` is the one that the next token takes: how many tokens the history has, without the pending one.
    """

    id: str
    created: int
    state: SessionState
    position: int
    has_pending: bool

    @property
    def is_empty(self) -> bool:
        return self.position == 0 and not self.has_pending


@dataclass(frozen=True, slots=True)
class Begun:
    """A generation may start behind `history`, whose items are token ids."""

    turn_id: str
    history: array[int]


@dataclass(slots=True)
class _OpenTurn:
    """A generation that has the session until `until` on the monotonic clock, and then until another begins. One that
    is over is kept as long: its end may be told twice."""

    id: str
    delta: array[int]
    until: float
    is_over: bool = False


@dataclass(slots=True)
class _Session:
    """`account` is whose it is. `used_at`: on the monotonic clock."""

    account: str
    used_at: float
    tokens: array[int] = field(default_factory=lambda: array("I"))
    has_pending: bool = False
    failed: bool = False
    turn: _OpenTurn | None = None
    id: str = field(default_factory=lambda: f"session-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def position(self) -> int:
        return len(self.tokens) - self.has_pending


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How many sessions there may be, and when an idle one is forgotten. `lease_s`: how long a generation has its
    session without being renewed."""

    max_sessions: int
    max_per_account: int
    idle_s: float
    lease_s: float = 10.0


class Sessions:
    """All sessions of a service. Owner: one event loop, or one thread. `clock`: monotonic, in seconds."""

    def __init__(self, limits: SessionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._by_turn: dict[str, _Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, account: str) -> SessionView:
        """A new session without tokens. Raises `QueueFull` where there are too many."""
        return self._add(_Session(account, self._clock()))

    def get(self, session_id: str, account: str) -> SessionView:
        """Raises `UnknownSession`, also for a session of somebody else."""
        return self._view(self._find(session_id, account))

    def of(self, account: str) -> list[SessionView]:
        """The account's sessions, the least recently used first."""
        self._expire()
        return [self._view(session) for session in self._sessions.values() if session.account == account]

    def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        """A session of its own with the first `at` tokens, or with the whole history, the pending token included.

        Raises `InvalidRequest` where `at` is not in [0, position], and `UnknownSession`, `SessionFailed`, `QueueFull`.
        """
        session = self._find(session_id, account)
        if at is not None and not 0 <= at <= session.position:
            raise InvalidRequest(
                f"session position is invalid: at must lie in [0, {session.position}], not {at}", param="at"
            )
        if session.failed:
            raise SessionFailed("session cannot continue after an executor failure")
        if at is None:
            return self._add(_Session(account, self._clock(), session.tokens[:], session.has_pending))
        return self._add(_Session(account, self._clock(), session.tokens[:at]))

    def close(self, session_id: str, account: str) -> None:
        """Forget it; a generation on it has lost it. Raises `UnknownSession`."""
        self._forget(self._find(session_id, account))

    def begin(self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int) -> Begun:
        """Take the session for one generation behind `delta`. A refusal changes nothing.

        Raises `UnknownSession`, `InvalidRequest`, `SessionFailed` or `SessionBusy`, in the order in which they are
        looked for.
        """
        session = self._find(session_id, account)
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
        if session.failed:
            raise SessionFailed("session cannot continue after an executor failure")
        if self._is_busy(session):
            raise SessionBusy("session already has an active generation")
        self._drop_turn(session)
        turn = _OpenTurn(f"turn-{uuid.uuid4().hex}", array("I", delta), self._clock() + self._limits.lease_s)
        session.turn = turn
        self._by_turn[turn.id] = session
        self._use(session)
        return Begun(turn.id, session.tokens[:])

    def renew(self, turn_ids: Iterable[str]) -> list[str]:
        """These generations go on; gives those that have lost their session: it was closed, or taken by another."""
        until = self._clock() + self._limits.lease_s
        lost = []
        for turn_id in turn_ids:
            session = self._by_turn.get(turn_id)
            if session is None or session.turn is None:
                lost.append(turn_id)
            else:
                session.turn.until = until
        return lost

    def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        """Give the session back with what was generated, whose absence leaves it as it was; `failed` on the side of the
        workers, and it takes no more. Gives whether the session has it: not where the generation had lost it. The
        second time, which changes nothing, it gives the same."""
        session = self._by_turn.get(turn_id)
        if session is None or session.turn is None:
            return False
        if session.turn.is_over:
            return True
        if generated:
            session.tokens += session.turn.delta
            session.tokens.extend(generated)
            session.has_pending = True
        session.failed = failed
        session.turn.is_over, session.turn.delta = True, array("I")
        self._use(session)
        return True

    def _find(self, session_id: str, account: str) -> _Session:
        self._expire()
        session = self._sessions.get(session_id)
        if session is None or session.account != account:
            raise UnknownSession("session is not open", param="session_id")
        return session

    def _view(self, session: _Session) -> SessionView:
        state = SessionState.BUSY if self._is_busy(session) else SessionState.IDLE
        state = SessionState.FAILED if session.failed else state
        return SessionView(session.id, session.created, state, session.position, session.has_pending)

    def _is_busy(self, session: _Session) -> bool:
        turn = session.turn
        return turn is not None and not turn.is_over and turn.until > self._clock()

    def _add(self, session: _Session) -> SessionView:
        mine = len(self.of(session.account))
        limits = self._limits
        if mine >= limits.max_per_account or len(self._sessions) >= limits.max_sessions:
            most = min(limits.max_per_account, limits.max_sessions)
            raise QueueFull(f"{mine} sessions are open; at most {most} may be: close one", retry_after_s=limits.idle_s)
        self._sessions[session.id] = session
        return self._view(session)

    def _use(self, session: _Session) -> None:
        session.used_at = self._clock()
        self._sessions.move_to_end(session.id)

    def _drop_turn(self, session: _Session) -> None:
        if session.turn is not None:
            del self._by_turn[session.turn.id]
            session.turn = None

    def _forget(self, session: _Session) -> None:
        self._drop_turn(session)
        del self._sessions[session.id]

    def _expire(self) -> None:
        """Those that were not used for long stand in front; a busy one is used."""
        horizon = self._clock() - self._limits.idle_s
        for session in list(self._sessions.values()):
            if session.used_at > horizon:
                return
            if not self._is_busy(session):
                self._forget(session)

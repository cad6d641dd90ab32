"""What becomes of runs whose worker is lost, or did not take them: other workers go on with them.

Decides when, how often and how long it is tried. What goes on is made by `cluster.routing.run`; which worker takes it
is the router's choice. A draw depends on a sequence's seed and position alone, so the client sees a pause and nothing
else.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cluster.routing.run import Run
from cluster.routing.succession import Succession
from planner.errors import DeadlineExceeded, RequestRefused, Unavailable, WorkerLost
from planner.request import Adapter

RETRY_S = 0.05
"""While runs wait, workers are tried so often: whatever kept them from taking one may be over without a word."""


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """Patience with lost workers.

    * `timeout_s`: how long a run waits for a worker before it fails, and, where the last worker made room for another,
      how long new requests wait for that one.
    * `max_failovers`: how many workers one sequence may lose; one more and it fails, since it may be what kills them.
    * `max_held`: of new requests that wait for a worker at a time; more are refused.
    * `stall_timeout_s`: a worker that says nothing for so long while it has something to run counts as lost. One that
      gets on within a long step says so every other second.
    """

    timeout_s: float = 60.0
    max_failovers: int = 3
    stall_timeout_s: float = 60.0
    max_held: int = 2048


class Failover:
    """Runs that wait for a worker, longest first. Owner: `Streams`, on the gateway's event loop. Never blocks.

    `start` sends a run to a worker that has not refused it, or raises `RequestRefused`; nothing has then been sent.
    `expects_worker`: whether one will take runs that none takes now, so that new requests wait for it. `succession`:
    hears which worker makes room. Waiting runs are held weakly: one whose generation is gone waits no more.
    """

    def __init__(
        self,
        start: Callable[[Run], None],
        limits: FailoverLimits,
        succession: Succession,
        expects_worker: Callable[[], bool],
    ) -> None:
        self._start = start
        self._succession = succession
        self._expects_worker = expects_worker
        self._limits = limits
        self._waiting: weakref.WeakKeyDictionary[Run, str] = weakref.WeakKeyDictionary()  # and why
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._turn_at = 0.0  # not every loop's handle tells
        self._loop = asyncio.get_running_loop()

    @property
    def num_waiting(self) -> int:
        return sum(not run.over for run in list(self._waiting))

    def lost(self, runs: Iterable[Run], error: WorkerLost) -> None:
        """Their worker is gone, for the reason in `error`; no stream knows them any more."""
        for run in runs:
            if self._closed or run.num_losses >= self._limits.max_failovers:
                times = f"; before it the sequence had lost {run.num_losses} others" if run.num_losses else ""
                run.fail(WorkerLost(error.message + times))
            else:
                self._waiting.update(dict.fromkeys(run.successors(self._loop.time()), error.message))
        self._try_after(0.0)

    def refused(self, run: Run, worker_id: str, refusal: RequestRefused) -> None:
        """A worker did not take the run; no stream knows it any more.

        What was accepted before waits for another worker. A new request is only moved on from a worker that is about
        to end, which this may be the first word of; its client hears every other refusal.
        """
        run.refused_by.add(worker_id)
        if isinstance(refusal, Unavailable):
            self._succession.begin()
        if run.was_accepted:
            self._waiting[run] = refusal.message
            self._try_after(RETRY_S)
            return
        if isinstance(refusal, Unavailable) and not self._closed:
            self.begin(run, refusal)
        else:
            run.refuse(refusal)

    def recalled(self, run: Run) -> None:
        """A worker gave back what had waited there; no stream knows it any more. It goes where it is served first."""
        run.was_accepted, run.waits_since = True, self._loop.time()
        self._waiting[run] = "the request was moved from one worker to another"
        self._try_after(0.0)

    def begin(self, run: Run, refusal: RequestRefused | None = None) -> None:
        """Start a new request's run now, or once the worker is there that is expected; else it ends with `refusal`, if
        that is given, or with what `start` raised."""
        try:
            self._start(run)
        except RequestRefused as why_not:
            if self._may_wait(run, why_not) and len(self._waiting) < self._limits.max_held:
                self._waiting[run] = why_not.message
                self._try_after(RETRY_S)
            else:
                run.refuse(refusal or why_not)

    def look_again(self) -> None:
        """What workers are expected has changed: see at once what becomes of those that wait."""
        self._try_after(0.0)

    def close(self) -> None:
        """Give up what waits, and what is lost from now on."""
        self._closed = True
        for run in list(self._waiting):
            run.fail(WorkerLost("the gateway is shutting down"))
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _try_after(self, seconds: float) -> None:
        """Have the next turn at the latest then."""
        if not self._waiting or self._closed:
            return
        if self._timer is not None:
            if self._turn_at <= self._loop.time() + seconds:
                return
            self._timer.cancel()
        self._turn_at = self._loop.time() + seconds
        self._timer = self._loop.call_later(seconds, self._turn)

    def _turn(self) -> None:
        """Start what can be started; end what has waited too long."""
        self._timer = None
        without_room: dict[Adapter | None, RequestRefused] = {}  # why nobody takes anything with that adapter now
        for run, reason in list(self._waiting.items()):
            refusal = None if run.over else self._tried(run, without_room)
            if refusal is None or self._ended(run, reason, refusal):
                del self._waiting[run]
        self._try_after(RETRY_S)

    def _tried(self, run: Run, without_room: dict[Adapter | None, RequestRefused]) -> RequestRefused | None:
        """Why nobody takes the run now; None where somebody has it."""
        adapter = run.request.adapter
        if adapter in without_room:
            return without_room[adapter]
        try:
            self._start(run)
        except RequestRefused as refusal:
            if not run.refused_by:
                without_room[adapter] = refusal
            elif run.was_accepted:
                run.refused_by.clear()  # all the others were asked; next time it may be any
            return refusal
        return None

    def _ended(self, run: Run, reason: str, refusal: RequestRefused) -> bool:
        """End a run that nobody takes now if it is to wait no longer; whether it did."""
        deadline = run.request.deadline
        if deadline is not None and time.monotonic() >= deadline:
            run.fail(DeadlineExceeded(f"the request's deadline passed while it waited for a worker: {reason}"))
        elif self._may_wait(run, refusal):
            return False
        elif run.was_accepted:
            run.fail(WorkerLost(f"{reason}; no worker went on within {self._limits.timeout_s:g} s"))
        else:
            run.refuse(refusal)
        return True

    def _may_wait(self, run: Run, refusal: RequestRefused) -> bool:
        """Whether it has not waited too long; a new request only waits where a worker is expected."""
        if self._closed or self._loop.time() - run.waits_since >= self._limits.timeout_s:
            return False
        return run.was_accepted or (isinstance(refusal, Unavailable) and self._expects_worker())

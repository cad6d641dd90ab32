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
from planner.errors import DeadlineExceeded, RequestFailed, RequestRefused, Unavailable, WorkerLost
from planner.request import Adapter

RETRY_S = 0.05
"""While runs wait, workers are tried so often: whatever kept them from taking one may be over without a word."""


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """Patience with lost workers.

    * `timeout_s`: how long a run waits for a worker before it fails.
    * `max_failovers`: how many workers one sequence may lose; one more and it fails, since it may be what kills them.
    * `successor_s`: where all workers drain or are gone, how long new requests wait for the one that may replace the
      last of them.
    * `stall_timeout_s`: a worker that says nothing for so long while it has something to run counts as lost. One that
      gets on within a long step says so every other second.
    """

    timeout_s: float = 60.0
    max_failovers: int = 3
    stall_timeout_s: float = 60.0
    successor_s: float = 3.0


class Failover:
    """Runs that wait for a worker, longest first. Owner: `Streams`, on the gateway's event loop. Never blocks.

    `start` sends a run to a worker that has not refused it, or raises `RequestRefused`; nothing has then been sent.
    `expects_worker`: whether a worker that is there will take runs in a moment, for which new requests wait.
    Waiting runs are held weakly: one whose generation is gone waits no more.
    """

    def __init__(
        self, start: Callable[[Run], None], limits: FailoverLimits, expects_worker: Callable[[], bool]
    ) -> None:
        self._start = start
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
        to end; its client hears every other refusal.
        """
        run.refused_by.add(worker_id)
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
        """Start a new request's run now, or in a moment if a worker is expected; else it ends with `refusal`, if that
        is given, or with what `start` raised."""
        try:
            self._start(run)
        except RequestRefused as why_not:
            if isinstance(why_not, Unavailable) and self._expects_worker() and not self._closed:
                self._waiting[run] = why_not.message
                self._try_after(RETRY_S)
            else:
                run.refuse(refusal or why_not)

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
        without_room: set[Adapter | None] = set()  # adapters with which nobody takes anything now
        for run, reason in list(self._waiting.items()):
            if not run.was_accepted and not run.over:
                del self._waiting[run]
                self.begin(run)
                continue
            adapter = run.request.adapter
            if run.over or (adapter not in without_room and self._started(run)):
                del self._waiting[run]
                continue
            if adapter not in without_room:
                if not run.refused_by:
                    without_room.add(adapter)
                run.refused_by.clear()  # all the others were asked; next time it may be any
            if (why_over := self._why_over(run, reason)) is not None:
                del self._waiting[run]
                run.fail(why_over)
        self._try_after(RETRY_S)

    def _why_over(self, run: Run, reason: str) -> RequestFailed | None:
        """Why a run that was accepted waits no longer; None while it does."""
        deadline = run.request.deadline
        if deadline is not None and time.monotonic() >= deadline:
            return DeadlineExceeded(f"the request's deadline passed while it waited for a worker: {reason}")
        if self._loop.time() - run.waits_since >= self._limits.timeout_s:
            return WorkerLost(f"{reason}; no worker went on within {self._limits.timeout_s:g} s")
        return None

    def _started(self, run: Run) -> bool:
        try:
            self._start(run)
        except RequestRefused:
            return False
        return True

"""The engine: one thread that owns planner and executor, and turns requests into tokens step by step.

Free of torch: the executor is handed in. Other threads reach it through its inbox only. Not for the network:
`worker.serving` is.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from planner.blocks import BlockChanges
from planner.errors import InvalidConfiguration, RequestRefused, Unavailable, WorkerLost
from planner.limits import Limits, Snapshot
from planner.metrics import Metrics
from planner.planner import Planner
from planner.request import Request
from planner.step import Step
from worker.desk import Desk, News
from worker.executor import Executor, ProgramInfo
from worker.inbox import Inbox, Mail
from worker.patience import Patience
from worker.stats import EngineStats, kind_of, num_prefilled

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """What an engine does with requests. Only RUNNING takes new ones; only RUNNING and DRAINING run any."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's news for one client: (its key, update or refusal), and the state of the worker after the step.

    `blocks` are the changes of what is resident since the client's last report; in its first one, all of it.
    """

    updates: tuple[News, ...]
    snapshot: Snapshot
    blocks: BlockChanges = field(default_factory=BlockChanges)


Listener = Callable[[StepReport], None]


class Client:
    """One user of the engine, with keys of its own choosing for its requests. Its methods may be called on any
    thread, also from inside the listener; they return at once."""

    def __init__(self, inbox: Inbox[Client], listener: Listener) -> None:
        self._inbox = inbox
        self.listener = listener

    def submit(self, key: int, request: Request) -> None:
        """Ask for `request`. Updates come under `key`, or one refusal and nothing else.

        Raises `QueueFull` when the inbox is full, `Unavailable` when the engine takes nothing more, `InvalidRequest`
        when `key` is live. Nothing will come then.
        """
        self._inbox.submit(self, key, request)

    def cancel(self, key: int, indices: Collection[int] | None = None) -> None:
        """End all sequences of `key`, or those of `indices`, at the next step. Harmless after the end."""
        self._inbox.cancel(self, key, indices)

    def close(self) -> None:
        """Cancel everything, and hear no more than of the step that runs now. Harmless the second time."""
        self._inbox.close(self)


class Engine:
    """Owner of one engine thread. Every method may be called on any thread."""

    def __init__(
        self,
        executor: Executor | Callable[[], Executor],
        limits: Limits | Callable[[ProgramInfo], Limits],
        *,
        inbox_size: int,
        on_death: Callable[[BaseException], None],
        check_cells: bool = False,
    ) -> None:
        """`executor` and `limits` may be given as what makes them: both are then made on the engine thread, so that
        device state binds there and limits can follow the program. `on_death` is called once, on the engine thread,
        with what planner or executor raised. `check_cells` has the planner verify its cells after each step.
        """
        self._make_executor = executor if callable(executor) else lambda: executor
        self._make_limits = limits if callable(limits) else lambda _: limits
        self._on_death = on_death
        self._check_cells = check_cells
        self._inbox: Inbox[Client] = Inbox(inbox_size)
        self._started: Future[_Loop] = Future()
        self._phase = EngineState.STARTING
        self._draining = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> ProgramInfo:
        """Blocks until the program is ready; raises what making it raised."""
        self._thread.start()
        return self._started.result().info

    def connect(self, listener: Listener) -> Client:
        """`listener` gets one report a step, and one when something changed without a step, on the engine thread. It
        must not block. If it raises, its client is closed. Raises `Unavailable` when draining, stopped or dead."""
        client = Client(self._inbox, listener)
        self._inbox.connect(client)
        return client

    @property
    def state(self) -> EngineState:
        return EngineState.DRAINING if self._draining and self._phase is EngineState.RUNNING else self._phase

    @property
    def num_live(self) -> int:
        """Requests that were submitted and have not had their last news."""
        return self._inbox.num_live

    @property
    def stats(self) -> EngineStats:
        """Of the moment; needs a started engine."""
        return self._started.result().stats

    @property
    def metrics(self) -> Metrics:
        """The planner's counters, which the engine thread keeps moving; needs a started engine."""
        return self._started.result().metrics

    @property
    def snapshot(self) -> Snapshot:
        """As of the last report; needs a started engine."""
        return self._started.result().snapshot

    def drain(self) -> None:
        """Refuse new requests, run on with what was accepted. Every client gets a report."""
        self._draining = True
        self._inbox.refuse("the worker is draining")

    def stop(self) -> None:
        """Cancel everything, close the executor and wait for the end; called on the engine thread, without waiting.
        What is in flight is waited for and thrown away. Harmless the second time, and after death."""
        self._inbox.stop("the worker has stopped")
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            loop = self._make_loop()
        except BaseException as error:  # noqa: BLE001 - raised again by start()
            self._phase = EngineState.STOPPED
            self._inbox.stop("the worker did not start")
            self._started.set_exception(error)
            return
        self._phase = EngineState.RUNNING
        self._started.set_result(loop)
        try:
            loop.run()
            self._phase = EngineState.STOPPED
        except BaseException as error:
            logger.exception("the engine died")
            self._phase = EngineState.DEAD
            loop.abandon(error)
            self._on_death(error)
        finally:
            loop.close()

    def _make_loop(self) -> _Loop:
        executor = self._make_executor()
        try:
            return _Loop(executor, self._make_limits(executor.info), self._inbox, check_cells=self._check_cells)
        except BaseException:
            executor.close()
            raise


class _Launched(NamedTuple):
    """A step in flight. `num_dequeued`: prompt tokens that it took off the queue, those found cached included;
    `left_some`: more are queued than it could take."""

    step: Step
    at: float
    num_dequeued: int
    left_some: bool


class _Loop:
    """What the engine thread does. Owner of planner, executor and books; lives on that thread. What may be read
    anywhere: `info`, `stats` and `snapshot` (immutable values, replaced whole), and `metrics` (counters that only
    grow)."""

    def __init__(self, executor: Executor, limits: Limits, inbox: Inbox[Client], *, check_cells: bool) -> None:
        if limits.max_steps_in_flight > executor.max_steps_in_flight:
            raise InvalidConfiguration(
                f"limits plan {limits.max_steps_in_flight} steps in flight, the executor takes "
                f"{executor.max_steps_in_flight}",
                param="max_steps_in_flight",
            )
        self.info = executor.info
        self.stats = EngineStats()
        self._executor = executor
        self._planner = Planner(limits)
        self.metrics = self._planner.metrics
        self._depth = limits.max_steps_in_flight
        self._inbox = inbox
        self._desk: Desk[Client] = Desk()
        self._newcomers: set[Client] = set()
        self._patience = Patience(self._planner)
        self._in_flight: deque[_Launched] = deque()
        self._settled_at = 0.0
        self._has_news = False
        self._check_cells = check_cells
        self.snapshot = self._planner.snapshot()

    def run(self) -> None:
        """Take turns until told to stop. Raises what planner or executor raised."""
        while not self._read_mail().stopping:
            self._expire()
            step = self._launch()
            if self._in_flight and (step is None or len(self._in_flight) == self._depth):
                self._settle()
            self._report()
        self._wind_up()

    def abandon(self, error: BaseException) -> None:
        """After `run` raised: fail what was accepted, refuse what was still queued, and tell everyone."""
        self._inbox.stop("the worker's engine died")
        self._deliver()
        self._desk.fail_all(WorkerLost(f"the worker's engine died of {type(error).__name__}"))
        self._deliver()
        for client in self._inbox.take(wait=False).connects:
            self._desk.connect(client)
        for client, key in self._inbox.live():
            self._desk.refuse(client, key, Unavailable("the worker's engine died before the request began"))
        self._deliver()

    def close(self) -> None:
        self._executor.close()

    def _read_mail(self) -> Mail[Client]:
        mail = self._inbox.take(wait=not (self._in_flight or self._planner.has_work))
        for client in mail.connects:
            self._desk.connect(client)
            self._newcomers.add(client)
        for submit in mail.submits:
            self._submit(submit.client, submit.key, submit.request)
        for (client, key), indices in mail.cancels.items():
            request_id = self._desk.request_id(client, key)
            if request_id is not None:
                self._desk.note(self._planner.cancel(request_id, indices))
        for client in mail.closes:
            for request_id in self._desk.request_ids(client):
                self._desk.note(self._planner.cancel(request_id))
            self._desk.disconnect(client)
        self._has_news = bool(mail)
        return mail

    def _submit(self, client: Client, key: int, request: Request) -> None:
        try:
            request_id = self._patience.submit(request, time.monotonic())
        except RequestRefused as refusal:
            self._desk.refuse(client, key, refusal)
        else:
            self._desk.accept(client, key, request_id, request.n)

    def _expire(self) -> None:
        if expired := self._patience.expire(time.monotonic()):
            self._desk.note(expired)
            self._has_news = True

    def _launch(self) -> Step | None:
        num_hits = self.metrics.num_prefix_hits
        step = self._planner.plan()
        if step is not None:
            left_some = self._planner.num_queued_tokens > 0
            num_dequeued = num_prefilled(step) + self.metrics.num_prefix_hits - num_hits if left_some else 0
            self._in_flight.append(_Launched(step, time.monotonic(), num_dequeued, left_some))
            self._executor.launch(step)
        assert self._in_flight or not self._planner.has_work, "the planner has work and plans nothing"
        return step

    def _settle(self) -> None:
        result = self._executor.collect()
        step, launched_at, num_dequeued, left_some = self._in_flight.popleft()
        now = time.monotonic()
        seconds = now - max(launched_at, self._settled_at)
        self.stats = self.stats.after_step(kind_of(step), seconds)
        self._patience.rate.note_step(num_dequeued, seconds, left_some=left_some)
        self._settled_at = now
        self._desk.note(self._planner.commit(step, result))
        if self._check_cells:
            self._planner.check()
        self._has_news = True

    def _report(self) -> None:
        if self._has_news:
            rate = self._patience.rate.tokens_per_s
            self.snapshot = replace(self._planner.snapshot(), queue_tokens_per_s=rate)
            self._inbox.advise(self._patience.retry_after_s)
            self._deliver()

    def _deliver(self) -> None:
        """Hand every client its report. Keys that ended are free again before their client hears of it."""
        reports, ended = self._desk.take()
        self._inbox.forget(ended)
        self.stats = replace(self.stats, emitted_at=time.monotonic())
        blocks = self._planner.blocks
        changes, everything = blocks.take_changes(), blocks.everything if self._newcomers else BlockChanges()
        for client, news in reports:
            known = everything if client in self._newcomers else changes
            try:
                client.listener(StepReport(news, self.snapshot, known))
            except Exception:
                logger.exception("a listener raised; its client is closed")
                client.close()
        self._newcomers.clear()

    def _wind_up(self) -> None:
        self._desk.note(self._planner.cancel_all())
        while self._in_flight:
            self._settle()
        self._has_news = True
        self._report()

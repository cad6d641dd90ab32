"""What the engine's thread does: reads the mail, plans, launches, settles and reports, turn by turn.

Free of torch. Not for starting and ending the thread: `worker.engine` is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

from opentelemetry.trace import Tracer

from planner.blocks import BlockChanges
from planner.errors import InvalidConfiguration, RequestRefused, Unavailable, WorkerLost
from planner.journal import JournaledPlanner
from planner.limits import Limits
from planner.planner import Planner
from planner.request import Adapter, Request, Update
from planner.step import Step
from worker.adapters import AdapterOrder, AdapterShelf
from worker.client import Client, StepReport
from worker.desk import Desk
from worker.executor import Executor
from worker.inbox import Inbox, Mail
from worker.inspection import NUM_STEPS_KEPT, EngineView, StepRecord
from worker.patience import Patience
from worker.pulse import Pulse
from worker.request_spans import RequestSpans
from worker.stats import EngineStats, kind_of, num_prefilled
from worker.step_log import StepLog
from worker.totals import Tally

logger = logging.getLogger(__name__)


class _Launched(NamedTuple):
    """A step in flight. `num_dequeued`: prompt tokens that it took off the queue, those found cached included;
    `left_some`: more are queued than it could take."""

    step: Step
    at: float
    num_dequeued: int
    left_some: bool


class Loop:
    """What the engine thread does. Owner of planner, executor and books; lives on that thread. What may be read
    anywhere: `info`, `stats`, `snapshot`, `adapters` and `totals` (immutable values, replaced whole), `metrics`
    (counters that only grow) and `pulse`; of `slots`, `read` may be called."""

    def __init__(
        self,
        executor: Executor,
        limits: Limits,
        inbox: Inbox[Client],
        *,
        tracer: Tracer,
        check_cells: bool,
        step_log: StepLog | None = None,
    ) -> None:
        if limits.max_steps_in_flight > executor.max_steps_in_flight:
            raise InvalidConfiguration(
                f"limits plan {limits.max_steps_in_flight} steps in flight, the executor takes "
                f"{executor.max_steps_in_flight}",
                param="max_steps_in_flight",
            )
        self.info = executor.info
        self.slots = executor.adapters
        self.stats = EngineStats()
        self._executor = executor
        self._step_log = step_log
        self._planner = Planner(limits) if step_log is None else JournaledPlanner(limits, step_log.write)
        self.metrics = self._planner.metrics
        self._tally = Tally(self.metrics, self._planner.live)
        self.totals = self._tally.totals()
        self._depth = limits.max_steps_in_flight
        self._inbox = inbox
        self._mail: Mail[Client] = Mail()  # what is being applied
        self._desk: Desk[Client] = Desk()
        self._spans = RequestSpans(tracer)
        self._newcomers: set[Client] = set()
        self._patience = Patience(self._planner)
        self._shelf = AdapterShelf(executor.adapters, self._planner.live)
        self._adapters_told: tuple[Adapter, ...] = ()
        self._in_flight: deque[_Launched] = deque()
        self._last_steps: deque[StepRecord] = deque(maxlen=NUM_STEPS_KEPT)
        self._settled_at = 0.0
        self._num_turns = 0
        self._is_idle = False
        self._has_news = False
        self._check_cells = check_cells
        self.snapshot = self._planner.snapshot()
        inbox.advise(self._patience.retry_after_s, self.snapshot)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return self._shelf.adapters

    @property
    def pulse(self) -> Pulse:
        return Pulse(self._num_turns + self._executor.num_beats, self._is_idle)

    def run(self) -> None:
        """Take turns until told to stop. Raises what planner or executor raised."""
        while not self._read_mail().stopping:
            self._expire()
            step = self._launch()
            if self._in_flight and (step is None or len(self._in_flight) == self._depth):
                self._settle()
            if not self._in_flight:
                self._shelf.sweep()
            self._report()
        self._wind_up()

    def abandon(self, error: BaseException) -> None:
        """After `run` raised: fail what was accepted, refuse what was still queued, and tell everyone."""
        self._inbox.stop("the worker's engine died")
        self._deliver()
        self._desk.fail_all(WorkerLost(f"the worker's engine died of {type(error).__name__}"))
        self._deliver()
        unread = self._inbox.take(wait=False)
        for client in unread.connects:
            self._desk.connect(client)
        for client, key in self._inbox.live():
            self._desk.refuse(client, key, Unavailable("the worker's engine died before the request began"))
        self._deliver()
        for mail in (self._mail, unread):
            mail.give_up(Unavailable("the worker's engine died"))

    def close(self) -> None:
        self._spans.close()
        self._executor.close()
        if self._step_log is not None:
            self._step_log.close()

    def _read_mail(self) -> Mail[Client]:
        self._num_turns += 1
        self._is_idle = not (self._in_flight or self._planner.has_work)
        if self._is_idle and self._step_log is not None:
            self._step_log.flush()
        mail = self._mail = self._inbox.take(wait=self._is_idle)
        self._is_idle = False
        for client in mail.connects:
            self._desk.connect(client)
            self._newcomers.add(client)
        for submit in mail.submits:
            self._submit(submit.client, submit.key, submit.request)
        for (client, key), indices in mail.cancels.items():
            request_id = self._desk.request_id(client, key)
            if request_id is not None:
                self._note(self._planner.cancel(request_id, indices))
        for client, key in mail.recalls:
            self._recall(client, key)
        for client in mail.closes:
            for request_id in self._desk.request_ids(client):
                self._note(self._planner.cancel(request_id))
            self._desk.disconnect(client)
        if mail.orders:
            self._carry_out(mail.orders)
        for view in mail.looks:
            if view.set_running_or_notify_cancel():  # whoever asked may have gone meanwhile
                view.set_result(self._view())
        self._has_news = mail.has_news
        return mail

    def _submit(self, client: Client, key: int, request: Request) -> None:
        now = time.monotonic()
        try:
            self._shelf.check(request)
            request_id = self._patience.submit(request, now)
        except RequestRefused as refusal:
            self._desk.refuse(client, key, refusal)
        else:
            self._tally.queued(request_id, now)
            self._shelf.note(request_id, request)
            self._spans.queued(request_id, request)
            self._desk.accept(client, key, request_id, request.n)
            self._executor.prepare(request)

    def _recall(self, client: Client, key: int) -> None:
        request_id = self._desk.request_id(client, key)
        if request_id is not None and not self._planner.has_begun(request_id):
            self._spans.note(self._planner.cancel(request_id))
            self._desk.give_back(request_id, Unavailable("the request was asked back before it had begun"))

    def _carry_out(self, orders: Collection[AdapterOrder]) -> None:
        """Matrices change under no step in flight."""
        while self._in_flight:
            self._settle()
        for order in orders:
            self._shelf.carry_out(order)

    def _note(self, updates: Collection[Update]) -> None:
        self._desk.note(updates)
        self._spans.note(updates)

    def _view(self) -> EngineView:
        return EngineView(
            self._planner.limits, self._planner.snapshot(), self._planner.inspect(), tuple(self._last_steps)
        )

    def _expire(self) -> None:
        if expired := self._patience.expire(time.monotonic()):
            self._note(expired)
            self._has_news = True

    def _launch(self) -> Step | None:
        num_hits = self.metrics.num_prefix_hits
        step = self._planner.plan()
        if step is not None:
            now = time.monotonic()
            if moves := self._planner.take_moves():
                self._tally.moved(moves, now)
                self._spans.moved(moves)
            left_some = self._planner.num_queued_tokens > 0
            num_dequeued = num_prefilled(step) + self.metrics.num_prefix_hits - num_hits if left_some else 0
            self._in_flight.append(_Launched(step, now, num_dequeued, left_some))
            self._executor.launch(step)
        assert self._in_flight or not self._planner.has_work, "the planner has work and plans nothing"
        return step

    def _settle(self) -> None:
        result = self._executor.collect()
        step, launched_at, num_dequeued, left_some = self._in_flight.popleft()
        now = time.monotonic()
        seconds = now - max(launched_at, self._settled_at)
        kind = kind_of(step)
        self.stats = self.stats.after_step(kind, seconds)
        self._tally.step(kind, seconds)
        self._patience.rate.note_step(num_dequeued, seconds, left_some=left_some)
        self._settled_at = now
        self._last_steps.append(StepRecord(step, seconds, self.snapshot))
        self._note(self._planner.commit(step, result))
        if self._check_cells:
            self._planner.check()
        self._has_news = True

    def _report(self) -> None:
        if self._has_news:
            rate = self._patience.rate.tokens_per_s
            self.snapshot = replace(self._planner.snapshot(), queue_tokens_per_s=rate)
            self._inbox.advise(self._patience.retry_after_s, self.snapshot)
            self._deliver()

    def _deliver(self) -> None:
        """Hand every client its report. Keys that ended are free again before their client hears of it."""
        reports, ended = self._desk.take()
        self._inbox.forget(ended)
        now = time.monotonic()
        self.stats = replace(self.stats, emitted_at=now)
        is_new = self._tally.due(now) or not self._planner.has_work
        if is_new:
            self.totals = self._tally.totals()
        blocks = self._planner.blocks
        adapters = self._shelf.adapters
        has_changed, self._adapters_told = adapters != self._adapters_told, adapters
        changes, everything = blocks.take_changes(), blocks.everything if self._newcomers else BlockChanges()
        for client, news in reports:
            is_newcomer = client in self._newcomers
            known, totals = everything if is_newcomer else changes, self.totals if is_newcomer or is_new else None
            try:
                told = adapters if has_changed or (is_newcomer and adapters) else None
                client.listener(StepReport(news, self.snapshot, known, totals, told))
            except Exception:
                logger.exception("a listener raised; its client is closed")
                client.close()
        self._newcomers.clear()

    def _wind_up(self) -> None:
        self._note(self._planner.cancel_all())
        while self._in_flight:
            self._settle()
        self._has_news = True
        self._report()

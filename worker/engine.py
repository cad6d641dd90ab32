"""The engine: one thread that owns planner and executor, and turns requests into tokens step by step.

Free of torch: the executor is handed in. Other threads reach it through its inbox only. Not for the network:
`worker.serving` is. What the thread does is in `worker.loop`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from pathlib import Path

from opentelemetry.trace import NoOpTracer, Tracer

from planner.errors import InvalidAdapter, Unavailable
from planner.limits import Limits, Snapshot
from planner.metrics import Metrics
from planner.request import Adapter
from worker.adapters import AdapterOrder
from worker.client import Client, Listener
from worker.executor import Executor, ProgramInfo
from worker.inbox import Inbox
from worker.inspection import EngineView
from worker.loop import Loop
from worker.pulse import Pulse
from worker.stats import EngineStats
from worker.step_log import StepLog
from worker.totals import Totals

logger = logging.getLogger(__name__)


class EngineState(Enum):
    """What an engine does with requests. Only RUNNING takes new ones; only RUNNING and DRAINING run any."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    DEAD = "dead"


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
        step_log: Path | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`executor` and `limits` may be given as what makes them: both are then made on the engine thread, so that
        device state binds there and limits can follow the program. `on_death` is called once, on the engine thread,
        with what planner or executor raised. `check_cells` has the planner verify its cells after each step. All that
        the planner is asked goes to the file `step_log`. Requests that have a trace get spans of `tracer`.
        """
        self._make_executor = executor if callable(executor) else lambda: executor
        self._make_limits = limits if callable(limits) else lambda _: limits
        self._on_death = on_death
        self._check_cells = check_cells
        self._step_log = step_log
        self._tracer = tracer or NoOpTracer()
        self._inbox: Inbox[Client] = Inbox(inbox_size)
        self._started: Future[Loop] = Future()
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
    def totals(self) -> Totals:
        """What it has counted, as of a moment ago; needs a started engine."""
        return self._started.result().totals

    @property
    def snapshot(self) -> Snapshot:
        """As of the last report, and with all that was submitted since; needs a started engine."""
        return self._inbox.snapshot or self._started.result().snapshot

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Those that take requests now; needs a started engine."""
        return self._started.result().adapters

    @property
    def pulse(self) -> Pulse:
        """Of the moment; needs a started engine."""
        return self._started.result().pulse

    def inspect(self) -> Future[EngineView]:
        """What it holds, filled in between two turns. Raises `Unavailable` once stopped, as the future does when the
        engine dies before it came to it.

        Costs the engine time in proportion to its pool; a look that is cancelled costs nothing.
        """
        view: Future[EngineView] = Future()
        self._inbox.look(view)
        return view

    def load_adapter(self, name: str, folder: Path) -> Future[Adapter]:
        """Read an adapter on the calling thread, and have the engine's thread load it between two turns, unless the
        future is cancelled before. Raises `InvalidAdapter`, as the future does, and `Unavailable` once stopped, as the
        future does when the engine dies; needs a started engine."""
        slots = self._started.result().slots
        if slots is None:
            raise InvalidAdapter("this worker was started without enable_lora", param="enable_lora")
        return self._order(AdapterOrder(name, slots.read(folder)))

    def unload_adapter(self, name: str) -> Future[Adapter]:
        """Refuse new requests for it from now on; those that run end as they would. The future may raise
        `UnknownModel`."""
        return self._order(AdapterOrder(name, None))

    def _order(self, order: AdapterOrder) -> Future[Adapter]:
        self._inbox.order(order)
        return order.done

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
            self._inbox.take(wait=False).give_up(Unavailable("the worker did not start"))
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
            try:
                loop.abandon(error)
            finally:
                self._on_death(error)
        finally:
            loop.close()

    def _make_loop(self) -> Loop:
        executor = self._make_executor()
        try:
            return Loop(
                executor,
                self._make_limits(executor.info),
                self._inbox,
                tracer=self._tracer,
                check_cells=self._check_cells,
                step_log=None if self._step_log is None else StepLog(self._step_log),
            )
        except BaseException:
            executor.close()
            raise

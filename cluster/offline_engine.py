"""One engine in this process, driven by one plain thread: for offline batches and benchmarks. No Ray, no network."""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from planner.errors import RequestRefused
from planner.limits import Limits
from planner.request import Request, Update
from worker.config import EngineConfig
from worker.engine import Engine, StepReport
from worker.executor import Executor, ProgramInfo


@dataclass(frozen=True, slots=True)
class News:
    """What one step brought for one request. `key` is the caller's name of it."""

    key: int
    update: Update | RequestRefused


class OfflineEngine:
    """Feeds an engine from an iterator of requests and yields what comes back.

    Owner and only caller: one thread, which may block here. `open_offline` makes one.
    """

    def __init__(self, engine: Engine, info: ProgramInfo) -> None:
        self.engine = engine
        self.info = info
        # Reports wait here while the caller is slower than the engine: never more than one for each token that the
        # requests in flight may still get.
        self._reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
        self._client = engine.connect(self._reports.put)
        self.peak_owned_cells = 0

    def run(self, requests: Iterable[tuple[int, Request]], max_in_flight: int) -> Iterator[News]:
        """Submit requests in order, never more than `max_in_flight` unfinished ones, until all have ended.

        Of each key comes either one refusal, or updates of which each sequence's last one has a finish reason.
        """
        waiting = iter(requests)
        unfinished: dict[int, int] = {}  # key -> how many of its sequences have not ended
        while True:
            while len(unfinished) < max_in_flight and (following := next(waiting, None)) is not None:
                key, request = following
                try:
                    self._client.submit(key, request)
                except RequestRefused as refusal:
                    yield News(key, refusal)
                else:
                    unfinished[key] = request.n
            if not unfinished:
                return
            report = self._reports.get()
            self.peak_owned_cells = max(self.peak_owned_cells, report.snapshot.owned_cells)
            for key, update in report.updates:
                if isinstance(update, RequestRefused):
                    del unfinished[key]
                elif update.finish_reason is not None:
                    unfinished[key] -= 1
                    if unfinished[key] == 0:
                        del unfinished[key]
                yield News(key, update)

    def cancel(self, key: int, indices: Collection[int] | None = None) -> None:
        """End a request's sequences at the next step; each still gets its last update."""
        self._client.cancel(key, indices)


@contextmanager
def open_offline(
    executor: Callable[[], Executor], limits: Callable[[ProgramInfo], Limits], *, inbox_size: int
) -> Iterator[OfflineEngine]:
    """An engine that lives as long as the block; whatever still runs at its end is cancelled.

    Raises what making the executor raised. A death of the engine shows as the failure of every unfinished sequence.
    """
    engine = Engine(executor, limits, inbox_size=inbox_size, on_death=lambda error: None)
    info = engine.start()
    try:
        yield OfflineEngine(engine, info)
    finally:
        engine.stop()


@contextmanager
def open_model(config: EngineConfig) -> Iterator[OfflineEngine]:
    """The engine of a real program. Raises `SetupError` where the checkpoint or the machine does not allow it."""
    from worker.program import build_executor, limits_for  # loads torch: for processes that run a model only

    with open_offline(
        lambda: build_executor(config), lambda info: limits_for(config, info), inbox_size=config.max_waiting
    ) as engine:
        yield engine

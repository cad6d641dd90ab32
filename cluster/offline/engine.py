"""One engine in this process, driven by one plain thread: for offline batches and benchmarks. No Ray, no network."""

from __future__ import annotations

import queue
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cluster.engine_factory import make_engine
from cluster.model_settings import BUILD_EXECUTOR
from planner.errors import RequestRefused
from planner.request import Request, Update
from worker.client import StepReport
from worker.config import EngineConfig
from worker.engine import Engine
from worker.executor import ProgramInfo
from worker.heap import settled


class News(NamedTuple):
    """What one step brought for one request. `key` is the caller's name of it."""

    key: int
    update: Update | RequestRefused


class Interrupted(Exception):
    """The run was told to end before all of it was done."""


class OfflineEngine:
    """Feeds an engine from an iterator of requests and yields what comes back.

    Owner and only caller: one thread, which may block here. `open_offline` makes one.
    """

    def __init__(self, engine: Engine, info: ProgramInfo) -> None:
        self.engine = engine
        self.info = info
        # Reports wait here while the caller is slower than the engine: never more than one for each token that the
        # requests in flight may still get.
        self._reports: queue.SimpleQueue[StepReport | Interrupted] = queue.SimpleQueue()
        self._client = engine.connect(self._reports.put)
        self.peak_owned_cells = 0

    def run(self, requests: Iterable[tuple[int, Request]], max_in_flight: int) -> Iterator[News]:
        """Submit requests in order, never more than `max_in_flight` unfinished ones, until all have ended.

        Of each key comes either one refusal, or updates of which each sequence's last one has a finish reason. Raises
        `Interrupted` after `interrupt`.
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
            if isinstance(report, Interrupted):
                raise report
            self.peak_owned_cells = max(self.peak_owned_cells, report.snapshot.owned_cells)
            for key, update in report.updates:
                if isinstance(update, RequestRefused):
                    del unfinished[key]
                elif update.finish_reason is not None:
                    unfinished[key] -= 1
                    if unfinished[key] == 0:
                        del unfinished[key]
            yield from map(News._make, report.updates)

    def cancel(self, key: int, indices: Collection[int] | None = None) -> None:
        """End a request's sequences at the next step; each still gets its last update."""
        self._client.cancel(key, indices)

    def interrupt(self) -> None:
        """End the run, once what has come so far was taken. May be called on any thread and by a signal handler."""
        self._reports.put(Interrupted())


@contextmanager
def open_offline(settings: EngineConfig, executor: str = BUILD_EXECUTOR) -> Iterator[OfflineEngine]:
    """An engine that lives as long as the block; whatever still runs at its end is cancelled.

    Raises `SetupError` where the checkpoint or the machine does not allow it. A death of the engine shows as the
    failure of every unfinished sequence.
    """
    # Nobody waits here but what the caller has in flight, and that is bounded by requests.
    unbounded = settings.model_copy(update={"max_waiting_tokens": sys.maxsize})
    with running(make_engine(unbounded, lambda error: None, executor)) as engine, settled():
        yield engine


@contextmanager
def running(engine: Engine) -> Iterator[OfflineEngine]:
    """Start `engine`, and stop it at the end of the block."""
    info = engine.start()
    try:
        yield OfflineEngine(engine, info)
    finally:
        engine.stop()

"""A listener that keeps all it hears, and lets a test wait for what it wants to hear."""

from __future__ import annotations

import threading
from collections.abc import Callable

from planner.errors import RequestRefused
from planner.limits import Snapshot
from planner.request import FinishReason, Update
from worker.client import StepReport


class Recorder:
    """Called on the engine thread, asked on the test's."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self.reports: list[StepReport] = []
        self.tokens: dict[tuple[int, int], tuple[int, ...]] = {}
        self.ends: dict[tuple[int, int], list[Update]] = {}
        self.refusals: dict[int, list[RequestRefused]] = {}

    def __call__(self, report: StepReport) -> None:
        with self._condition:
            self.reports.append(report)
            for key, news in report.updates:
                if isinstance(news, RequestRefused):
                    self.refusals.setdefault(key, []).append(news)
                else:
                    place = key, news.index
                    assert place not in self.ends, f"news of {place} after its end"
                    self.tokens[place] = self.tokens.get(place, ()) + news.tokens
                    if news.finish_reason is not None:
                        self.ends.setdefault(place, []).append(news)
            self._condition.notify_all()

    def wait(self, heard: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Block until `heard` is true after a report."""
        with self._condition:
            if not self._condition.wait_for(heard, timeout_s):
                raise TimeoutError(f"not heard in {timeout_s} s; ends {self.ends}, refusals {self.refusals}")

    def wait_ended(self, *keys: int, index: int = 0, timeout_s: float = 20.0) -> None:
        self.wait(lambda: all((key, index) in self.ends or key in self.refusals for key in keys), timeout_s)

    def wait_quiet(self) -> Snapshot:
        """Block until a report says that nothing runs or waits; return its snapshot."""
        self.wait(lambda: bool(self.reports) and not (self.snapshot.num_running or self.snapshot.num_waiting))
        return self.snapshot

    @property
    def snapshot(self) -> Snapshot:
        return self.reports[-1].snapshot

    def reason(self, key: int, index: int = 0) -> FinishReason | None:
        return self.ends[key, index][0].finish_reason

    def reasons(self) -> list[FinishReason | None]:
        return [end.finish_reason for ends in self.ends.values() for end in ends]

"""The runs that a gateway has at one worker, by their ids on the stream.

Runs are held weakly: a run whose owner forgot to cancel it ends when it is collected, not with its budget.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable

from cluster.routing.run import Run


class LiveRuns:
    """Owner: the worker's stream, on the gateway's event loop. `dropped` is called with the id of a run that was
    collected before it ended."""

    def __init__(self, dropped: Callable[[int], None]) -> None:
        self._dropped = dropped
        self._loop = asyncio.get_running_loop()
        self._runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
        self._finalizers: dict[int, weakref.finalize[..., Run]] = {}

    def __len__(self) -> int:
        """Those that have not ended, collected or not."""
        return len(self._finalizers)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._finalizers

    @property
    def ids(self) -> list[int]:
        return list(self._finalizers)

    @property
    def runs(self) -> list[Run]:
        """Those that somebody still waits for."""
        return list(self._runs.values())

    def get(self, request_id: int) -> Run | None:
        """None for a run that has ended here, or that nobody holds any more."""
        return self._runs.get(request_id)

    def add(self, request_id: int, run: Run) -> None:
        self._runs[request_id] = run
        finalizer = weakref.finalize(run, self._loop.call_soon_threadsafe, self._dropped, request_id)
        finalizer.atexit = False
        self._finalizers[request_id] = finalizer

    def remove(self, request_id: int) -> None:
        """The run has ended, and is stopped; ids that are not known are passed over."""
        if (run := self._runs.pop(request_id, None)) is not None:
            run.stop()
        if (finalizer := self._finalizers.pop(request_id, None)) is not None:
            finalizer.detach()

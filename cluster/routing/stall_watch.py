"""Notices a worker that has something to run and says nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallWatch:
    """Owner: the worker's stream, on the gateway's event loop. `has_work`: whether the worker owes a sign of life."""

    def __init__(self, timeout_s: float, has_work: Callable[[], bool]) -> None:
        self.timeout_s = timeout_s
        self._has_work = has_work
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self.has_stalled = False

    def hear(self) -> None:
        """The worker's engine spoke, or had nothing to say until now."""
        self._heard_at = self._loop.time()

    def recover(self) -> None:
        """A worker that stalled has spoken again."""
        self.has_stalled = False

    async def wait(self) -> None:
        """Returns when the worker hangs, and has then `has_stalled`.

        While this process itself was stopped nothing was heard either: what the worker said meanwhile is read first.
        """
        self.hear()
        while (left_s := self._quiet_until() - self._loop.time()) > 0:
            woken_at = self._loop.time() + left_s
            await asyncio.sleep(left_s)
            if self._loop.time() - woken_at > self.timeout_s / 8:
                self.hear()
        self.has_stalled = True

    def _quiet_until(self) -> float:
        """When the worker hangs if it says nothing; with nothing to run, a while after now."""
        if not self._has_work():
            return self._loop.time() + self.timeout_s / 8
        return self._heard_at + self.timeout_s

"""Keeps long work on text off the event loop: a few threads, and a short line in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from planner.errors import QueueFull

T = TypeVar("T")


class SideThreads:
    """Owner: the application; lives on its event loop.

    Work of at most `inline_size` (characters or bytes) is done at once, on the loop. Of larger work, `num_threads`
    run and `max_waiting` more wait; beyond that `QueueFull` is raised.
    """

    def __init__(self, *, inline_size: int, num_threads: int, max_waiting: int) -> None:
        self._inline_size = inline_size
        self._max_inside = num_threads + max_waiting
        self._threads = asyncio.Semaphore(num_threads)
        self._num_inside = 0

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises. `work` must not touch what lives on the loop."""
        if size <= self._inline_size:
            return work()
        if self._num_inside >= self._max_inside:
            raise QueueFull(f"{self._num_inside} long texts already wait to be read")
        self._num_inside += 1
        try:
            async with self._threads:
                return await asyncio.to_thread(work)
        finally:
            self._num_inside -= 1

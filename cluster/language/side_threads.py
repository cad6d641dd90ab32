"""Keeps long work on text off the event loop: a few threads, and a short line in front of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydantic import BaseModel

from planner.errors import QueueFull

T = TypeVar("T")


class SideThreads:
    """Owner: the application; lives on its event loop.

    Work of at most `inline_size` (characters or bytes) is done at once, on the loop. Of larger work, `num_threads`
    run and `max_waiting` more wait; beyond that `QueueFull` is raised. Work that runs keeps its place until it has
    ended, also when nobody waits for it any more: a thread cannot be broken off.
    """

    def __init__(self, *, inline_size: int, num_threads: int, max_waiting: int) -> None:
        self._inline_size = inline_size
        self._max_inside = num_threads + max_waiting
        self._places = threading.Semaphore(self._max_inside)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    def size_of(self, *values: object) -> int:
        """Characters of all texts in bodies, objects and lists, and one for all else in them; no further than it takes
        to know that they are long."""
        size, left = 0, list(values)
        while left and size <= self._inline_size:
            value = left.pop()
            if isinstance(value, str):
                size += len(value)
            elif isinstance(value, BaseModel):
                left += vars(value).values()
            elif isinstance(value, dict):
                left += (*value, *value.values())
            elif isinstance(value, list):
                size += len(value)
                left += value
            else:
                size += 1
        return size

    def total(self, sizes: Iterable[int]) -> int:
        """Their sum; no further than it takes to know that it is long."""
        total = 0
        for size in sizes:
            total += size
            if total > self._inline_size:
                break
        return total

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises. `work` must not touch what lives on the loop."""
        if size <= self._inline_size:
            return work()
        if not self._places.acquire(blocking=False):
            raise QueueFull(f"{self._max_inside} long texts already wait to be read")
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    async def run_admitted(self, size: int, work: Callable[[], T]) -> T:
        """As `run`, for what a request that was let in still needs: it takes no place in the line, and is not refused.
        There is as much of it as there are requests."""
        if size <= self._inline_size:
            return work()
        return await asyncio.wrap_future(self._threads.submit(work))

"""The store of files and batches, for an event loop: every question is put to it on one thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cluster.batches.store import BatchStore

T = TypeVar("T")


class BatchDesk:
    """Owner of the store and of its thread. Lives on a gateway's event loop."""

    def __init__(self, folder: Path) -> None:
        """Opens the store, which takes some milliseconds. Raises `OSError` or `sqlite3.Error` where it cannot."""
        self._store = BatchStore(folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def ask(self, question: Callable[[BatchStore], T]) -> T:
        """What `question` returns or raises. Once begun it is done to its end, whoever waits for it."""
        return await asyncio.wrap_future(self._thread.submit(question, self._store))

    async def close(self) -> None:
        """After the questions that were put."""
        await self.ask(BatchStore.close)
        self._thread.shutdown(wait=False)

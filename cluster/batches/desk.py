"""The store of files and batches, for an event loop: every question is put to it on one thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cluster.batches.store import BatchStore
from planner.errors import InvalidConfiguration

T = TypeVar("T")


class BatchDesk:
    """Owner of the store and of its thread. Lives on a gateway's event loop."""

    def __init__(self, folder: Path) -> None:
        """Opens the store, which takes some milliseconds. Raises `InvalidConfiguration` where it cannot."""
        try:
            self._store = BatchStore(folder)
        except (OSError, sqlite3.Error) as error:
            raise InvalidConfiguration(
                f"batch_store is {folder}, where nothing can be kept: {error}", param="batch_store"
            ) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")

    async def ask(self, question: Callable[[BatchStore], T]) -> T:
        """What `question` returns or raises. Once begun it is done to its end, whoever waits for it."""
        return await asyncio.wrap_future(self._thread.submit(question, self._store))

    async def close(self) -> None:
        """After the questions that were put."""
        await self.ask(BatchStore.close)
        self._thread.shutdown(wait=False)

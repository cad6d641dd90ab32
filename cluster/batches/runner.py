"""Runs the batches of a store, oldest first, in what capacity others leave.

What a run does is in `cluster.batches.run`.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from cluster.answers.maker import AnswerMaker
from cluster.batches.desk import BatchDesk
from cluster.batches.run import BatchRun
from cluster.batches.store import LEASE_S, Claimed
from cluster.models import Models
from cluster.routing.idle_room import IdleRoom

logger = logging.getLogger(__name__)

MOST_BATCHES: Final = 8  # that one runner runs at a time
LOOK_S: Final = 1.0


class BatchRunner:
    """Owner: a gateway; lives on its event loop. Several runners may share a store: each batch has one at a time."""

    def __init__(self, models: Models, desk: BatchDesk, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives Unix time."""
        self._models = models
        self._desk = desk
        self._clock = clock
        self._id = uuid.uuid4().hex
        self._rooms = {maker: _room(maker) for maker in models.all}
        self._news = asyncio.Event()
        self._holds: dict[str, asyncio.Task[None]] = {}
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._serving = asyncio.create_task(self._serve())

    def look(self) -> None:
        """A batch was added."""
        self._news.set()

    async def close(self) -> None:
        """End; what ran is left to others at once."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        holds = list(self._holds.values())
        for hold in holds:
            hold.cancel()
        await asyncio.gather(*holds, return_exceptions=True)

    async def _serve(self) -> None:
        """Never ends by itself: a disk that is full or a store that is locked now may not be in a moment."""
        while True:
            self._news.clear()
            try:
                await self._claim()
            except (sqlite3.Error, OSError):
                logger.exception("the store of batches was not looked at")
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()

    async def _claim(self) -> None:
        """Begin to run what nobody runs."""
        while len(self._holds) < MOST_BATCHES:
            claimed = await self._desk.ask(lambda store: store.claim(self._id))
            if claimed is None:
                return
            hold = asyncio.create_task(self._hold(claimed))
            self._holds[claimed.batch.id] = hold
            hold.add_done_callback(lambda done, batch_id=claimed.batch.id: self._end(batch_id, done))  # type: ignore[misc]

    def _end(self, batch_id: str, done: asyncio.Task[None]) -> None:
        del self._holds[batch_id]
        self.look()
        if not done.cancelled() and (fault := done.exception()) is not None:
            logger.error(
                "batch %s met a fault of ours; it is tried again after %g s", batch_id, LEASE_S, exc_info=fault
            )

    async def _hold(self, claimed: Claimed) -> None:
        """Run a batch while it is ours, until it ends, is cancelled, or its time is over."""
        batch = claimed.batch
        run = BatchRun(self._models, self._desk, self._rooms, claimed, self._clock)
        running = asyncio.create_task(run.run())
        try:
            while not running.done():
                await asyncio.wait({running}, timeout=LOOK_S)
                if running.done() or not await self._desk.ask(lambda store: store.renew(self._id, batch.id)):
                    break
                now = await self._desk.ask(lambda store: store.batch(claimed.account, batch.id))
                if now.status == "cancelling" or self._clock() >= batch.expires_at:
                    await _ended(running)
                    await run.break_off("cancelled" if now.status == "cancelling" else "expired")
                    return
            if running.done():
                running.result()
        except asyncio.CancelledError:
            await _ended(running)
            await self._desk.ask(lambda store: store.release(self._id, batch.id))
            raise
        finally:
            await _ended(running)


def _room(maker: AnswerMaker) -> IdleRoom:
    """What the workers of one model leave idle."""
    return IdleRoom(lambda: maker.service.fleet.reports)


async def _ended(running: asyncio.Task[None]) -> None:
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)

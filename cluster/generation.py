"""The updates of one request between the stream that receives them and the task that reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from planner.errors import RequestRefused, WorkerLost
from planner.request import FinishReason, Request, Update
from worker.outbox import merged

SendCancel = Callable[[Collection[int] | None], None]


class RemoteGeneration:
    """A `cluster.fleet.Generation` whose request runs on a worker. Lives on the gateway's event loop.

    Two sides: the stream calls `deliver`, `refuse` and `lose`; the task that submitted calls `next` and `cancel`.
    What waits to be read is merged, one update an index, so it is bounded by the request's own budget however late
    the reader comes. `send_cancel` tells the worker; it never blocks.
    """

    def __init__(self, request_id: int, request: Request, send_cancel: SendCancel) -> None:
        self.request_id = request_id
        self._live = set(range(request.n))
        self._pending: dict[int, Update] = {}
        self._refusal: RequestRefused | None = None
        self._news = asyncio.Event()
        self._send_cancel = send_cancel

    @property
    def over(self) -> bool:
        """Whether nothing more is expected from the worker."""
        return not self._live

    async def next(self) -> list[Update]:
        while not self._pending:
            if self._refusal is not None:
                raise self._refusal
            if self.over:
                return []  # every index was cancelled, perhaps while this waited
            await self._news.wait()
            self._news.clear()
        updates, self._pending = list(self._pending.values()), {}
        return updates

    def cancel(self, indices: Collection[int] | None = None) -> None:
        unwanted = self._live | self._pending.keys() if indices is None else set(indices)
        self._pending = {index: update for index, update in self._pending.items() if index not in unwanted}
        ending = self._live & unwanted
        if not ending:
            return
        self._live -= ending
        self._send_cancel(sorted(ending) if self._live else None)
        self._news.set()

    def deliver(self, update: Update) -> None:
        """Take in news of one sequence; what comes for an index that is over is dropped."""
        if update.index not in self._live:
            return
        waiting = self._pending.get(update.index)
        self._pending[update.index] = update if waiting is None else merged(waiting, update)
        if update.finish_reason is not None:
            self._live.discard(update.index)
        self._news.set()

    def refuse(self, refusal: RequestRefused) -> None:
        """The worker did not take the request."""
        self._refusal = refusal
        self._live.clear()
        self._news.set()

    def lose(self, error: WorkerLost) -> None:
        """The worker is gone: each sequence that still ran fails, after the tokens that did come."""
        for index in sorted(self._live):
            self.deliver(Update(self.request_id, index, finish_reason=FinishReason.FAILED, error=error))

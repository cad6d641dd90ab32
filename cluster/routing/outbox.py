"""Commands that wait to be written to one worker: bounded, and in an order in which a cancel overtakes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from planner.errors import QueueFull
from protos import worker_pb2 as pb

MAX_SUBMITS = 1024


class Outbox:
    """What was read, then submits in order, then recalls, then cancels. Owner: one worker's stream, on the gateway's
    event loop.

    Only submits are bounded by number; recalls and cancels are at most one for each request that lives on the stream,
    since cancels of one request are merged. A request that is cancelled before it was written is not written at all.
    """

    def __init__(self, max_submits: int = MAX_SUBMITS) -> None:
        self._max_submits = max_submits
        self._submits: dict[int, pb.Submit] = {}
        self._cancels: dict[int, set[int] | None] = {}  # None: all indices
        self._recalls: dict[int, None] = {}
        self._num_read: int | None = None
        self._filled = asyncio.Event()

    def submit(self, submit: pb.Submit) -> None:
        """Raises `QueueFull` where the worker does not read as fast as requests come; nothing has then changed."""
        if len(self._submits) >= self._max_submits:
            raise QueueFull(f"{len(self._submits)} requests wait to be sent to the worker already")
        self._submits[submit.request_id] = submit
        self._filled.set()

    def cancel(self, request_id: int, indices: Collection[int] | None) -> bool:
        """Whether the worker hears of it; False: it will never have heard of the request."""
        self._recalls.pop(request_id, None)
        if indices is None and self._submits.pop(request_id, None) is not None:
            self._cancels.pop(request_id, None)
            return False
        known = self._cancels.get(request_id, set())
        self._cancels[request_id] = None if indices is None or known is None else known | set(indices)
        self._filled.set()
        return True

    def recall(self, request_id: int) -> None:
        """Ask a request back, of which the worker knows."""
        if request_id not in self._cancels:
            self._recalls[request_id] = None
            self._filled.set()

    def note_read(self, num_messages: int) -> None:
        """Tell the worker that so many messages were read; only the newest number is sent."""
        self._num_read = num_messages
        self._filled.set()

    async def take(self) -> pb.Command:
        """The next command; waits for one."""
        while not (self._submits or self._recalls or self._cancels) and self._num_read is None:
            self._filled.clear()
            await self._filled.wait()
        if self._num_read is not None:
            num_messages, self._num_read = self._num_read, None
            return pb.Command(read=pb.Read(num_messages=num_messages))
        if self._submits:
            return pb.Command(submit=self._submits.pop(next(iter(self._submits))))
        if self._recalls:
            request_id, _ = self._recalls.popitem()
            return pb.Command(recall=pb.Recall(request_id=request_id))
        request_id = next(iter(self._cancels))
        indices = self._cancels.pop(request_id)
        return pb.Command(cancel=pb.Cancel(request_id=request_id, indices=sorted(indices or ())))

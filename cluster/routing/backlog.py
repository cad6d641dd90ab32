"""Requests at one worker that may not have begun there, and which of them were asked back."""

from __future__ import annotations

from itertools import islice


class Backlog:
    """Owner: the worker's stream, on the gateway's event loop. Request ids ascend as they are sent."""

    def __init__(self) -> None:
        self._movable: dict[int, None] = {}
        self._recalled: set[int] = set()

    @property
    def num_movable(self) -> int:
        """Requests that may not have begun, and were not asked back."""
        return len(self._movable)

    @property
    def num_recalled(self) -> int:
        """Requests that were asked back, of which nothing has been heard since."""
        return len(self._recalled)

    def sent(self, request_id: int) -> None:
        """A request that any worker may take, and that has not been moved before."""
        self._movable[request_id] = None

    def heard_of(self, request_id: int) -> None:
        """It has begun: it stays."""
        self._movable.pop(request_id, None)
        self._recalled.discard(request_id)

    def recall(self, count: int) -> list[int]:
        """The last `count`, which are to be asked back now."""
        newest = list(islice(reversed(self._movable), count))
        for request_id in newest:
            del self._movable[request_id]
        self._recalled.update(newest)
        return newest

    def was_recalled(self, request_id: int) -> bool:
        """Whether it was asked back, and nothing has been heard of it since."""
        return request_id in self._recalled

    def forget(self, request_id: int) -> None:
        """The worker has it no more."""
        self.heard_of(request_id)

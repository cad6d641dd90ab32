"""Which accepted requests run out of time, and when. Takes times, has no clock."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Final

SLACK: Final = 64


class Deadlines:
    """Owner: the engine thread. Requests that have ended are forgotten by and by."""

    def __init__(self, live: Collection[int]) -> None:
        """`live`: a view of the ids of the requests that have not ended."""
        self._live = live
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Entries kept; at most `SLACK` more than twice the live requests."""
        return len(self._heap)

    def add(self, request_id: int, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > 2 * len(self._live) + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)

    def take_passed(self, now: float) -> list[int]:
        """Ids of live requests whose deadline has come, the earliest first, each once."""
        passed = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if request_id in self._live:
                passed.append(request_id)
        return passed

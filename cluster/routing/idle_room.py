"""How much of a fleet is idle, and who may use it: work that must not be in anybody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from cluster.routing.fleet import WorkerReport

LOOK_S: Final = 0.05
SHARE: Final = 0.75
"""Of the seats that others leave: the rest is for those that come next, who then need not wait for one."""


def num_allowed(reports: Sequence[WorkerReport], num_inside: int) -> int:
    """How many pieces of idle work may run together, where `num_inside` do and the rest is somebody else's."""
    seats = sum(report.info.max_num_seqs for report in reports if not report.draining)
    busy = sum(report.snapshot.num_running + report.snapshot.num_waiting for report in reports)
    left = seats - max(0, busy - num_inside)
    return max(1, int(left * SHARE)) if left > 0 else 0


class IdleRoom:
    """Lets work in while there is room. Owner: one gateway, on its event loop; it knows its own work only, so what
    other gateways have inside is somebody else's to it."""

    def __init__(self, reports: Callable[[], Sequence[WorkerReport]]) -> None:
        self._reports = reports
        self._num_inside = 0

    async def enter(self) -> None:
        """Waits until there is room."""
        while self._num_inside >= num_allowed(self._reports(), self._num_inside):  # noqa: ASYNC110 - reports tell nobody
            await asyncio.sleep(LOOK_S)
        self._num_inside += 1

    def leave(self) -> None:
        self._num_inside -= 1

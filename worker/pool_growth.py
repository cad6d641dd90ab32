"""When a pool that began small becomes larger, and by how much. Not for moving bytes: the pool does that itself.

The planner counts in cells of the largest size from the start and hands out the lowest ones first, so a pool need only
be as large as the highest cell that was ever used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from planner.step import Step
from worker.kv_pool import KvPool

logger = logging.getLogger(__name__)


def next_size(num_cells: int, required: int, max_cells: int) -> int:
    """Cells of a pool of `num_cells` that needs `required` <= `max_cells`.

    At least twice as many as before, so that all growth together copies less than the last pool holds; and all at once
    where twice that would be too many, so that the last growth too starts from no more than half.
    """
    if required <= num_cells:
        return num_cells
    size = max(required, 2 * num_cells)
    return size if 2 * size <= max_cells else max_cells


def required_cells(step: Step) -> int:
    """One past the highest cell that a step writes. What it reads besides was written before."""
    written = [chunk.cells[chunk.start :] for chunk in step.chunks] + [back.cells for back in step.swaps_in]
    return int(np.concatenate(written).max(initial=-1)) + 1 if written else 0


class PoolGrowth:
    """Owner: the executor, on the engine thread.

    Copies are ordered on torch's current stream. `moved` is called after the bytes are in their new place: whoever
    holds addresses of the pool takes them anew.
    """

    def __init__(self, pool: KvPool, max_cells: int, moved: Callable[[], None]) -> None:
        self._pool = pool
        self._max_cells = max_cells
        self._moved = moved
        self.num_growths = 0

    @property
    def is_done(self) -> bool:
        return self._pool.num_cells >= self._max_cells

    @property
    def num_cells(self) -> int:
        """Of the pool, as it is now."""
        return self._pool.num_cells

    def make_room(self, num_cells: int) -> None:
        """Have at least `num_cells` cells. Raises torch's `OutOfMemoryError`, and nothing has changed, where the device
        does not hold the old pool and the new one together; a later call may find the room."""
        size = next_size(self._pool.num_cells, num_cells, self._max_cells)
        if size == self._pool.num_cells:
            return
        began, before = time.perf_counter(), self._pool.num_cells
        self._pool.grow(size)
        self.num_growths += 1
        self._moved()
        if self._pool.keys.device.type == "cuda":
            torch.cuda.empty_cache()  # the old pool's memory is of no size that anything else asks for
        logger.info("the pool grew from %d to %d cells in %.2f s", before, size, time.perf_counter() - began)

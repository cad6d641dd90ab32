"""The free cells of a pool: taken lowest first, many at a time, at a cost that hardly grows with how many."""

from __future__ import annotations

import numpy as np

from planner.request import CellArray

_SMALLEST_WINDOW = 64


class FreeCells:
    """A mark for each cell, and where to look. Nothing below `_first` is free, nothing from `_used_end` on is used.

    A heap would hand out the same cells, but at the price of a walk through it for each cell taken or put back, which
    a step that prefills thousands of tokens feels.
    """

    def __init__(self, capacity: int) -> None:
        self._is_free = np.ones(capacity, np.bool_)
        self._num_free = capacity
        self._first = 0
        self._used_end = 0

    def __len__(self) -> int:
        return self._num_free

    @property
    def used_end(self) -> int:
        """One past the highest cell that is not free."""
        return self._used_end

    def take(self, count: int) -> CellArray:
        """The `count` lowest ones, ascending; there must be as many."""
        assert 0 <= count <= self._num_free
        if count == 0:
            return np.empty(0, np.int32)
        found: list[CellArray] = []
        missing, at, window = count, self._first, max(_SMALLEST_WINDOW, count)
        while missing:
            hits = np.flatnonzero(self._is_free[at : at + window])[:missing] + at
            found.append(hits.astype(np.int32))
            missing -= len(hits)
            at, window = at + window, 2 * window
        cells = found[0] if len(found) == 1 else np.concatenate(found)
        self._is_free[cells] = False
        self._num_free -= count
        self._first = int(cells[-1]) + 1
        self._used_end = max(self._used_end, self._first)
        return cells

    def put_back(self, cells: CellArray) -> None:
        """int32[n] distinct cells that are not free."""
        if len(cells) == 0:
            return
        self._is_free[cells] = True
        self._num_free += len(cells)
        self._first = min(self._first, int(cells.min()))
        if int(cells.max()) + 1 == self._used_end:
            self._used_end = self._end_of_used(self._used_end)

    def marks(self) -> CellArray:
        """int32[n]: all free cells, ascending; for checks."""
        return np.flatnonzero(self._is_free).astype(np.int32)

    def _end_of_used(self, end: int) -> int:
        window = _SMALLEST_WINDOW
        while end:
            start = max(0, end - window)
            used = np.flatnonzero(~self._is_free[start:end])
            if len(used):
                return start + int(used[-1]) + 1
            end, window = start, 2 * window
        return 0

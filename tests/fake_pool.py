"""A pool that remembers what was written to each cell, so that a wrong cell list is caught where it is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NO_HISTORY = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_SPOILT = -1


class WrongStepError(AssertionError):
    """The step breaks a promise of the seam."""


def next_hash(history: int, token: int) -> int:
    """Hash of a history and one token more (splitmix64's finaliser; Steele, Lea, Flood 2014)."""
    z = (history + (token + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class FakePool:
    """What each cell holds: its token's position, and the hash of the history up to that token."""

    def __init__(self, num_cells: int) -> None:
        self._position = np.full(num_cells, _SPOILT, dtype=np.int64)
        self._before = np.zeros(num_cells, dtype=np.uint64)
        self._after = np.zeros(num_cells, dtype=np.uint64)

    def history(self, cells: np.ndarray[Any, Any], root: int = 0) -> int:
        """Hash of the history below `root` that these cells, positions 0.. in order, hold. Raises if they hold none."""
        if len(cells) == 0:
            return NO_HISTORY ^ root
        if not np.array_equal(self._position[cells], np.arange(len(cells))):
            raise WrongStepError(f"cells {cells.tolist()} hold positions {self._position[cells].tolist()}")
        follows = np.array_equal(self._before[cells[1:]], self._after[cells[:-1]])
        if self._before[cells[0]] != NO_HISTORY ^ root or not follows:
            raise WrongStepError(f"cells {cells.tolist()} hold tokens of different sequences")
        return int(self._after[cells[-1]])

    def write(self, cells: np.ndarray[Any, Any], start: int, history: int, tokens: Sequence[int]) -> int:
        for offset, token in enumerate(tokens):
            cell = cells[start + offset]
            self._position[cell], self._before[cell] = start + offset, history
            history = next_hash(history, token)
            self._after[cell] = history
        return history

    def copy(self, cells: np.ndarray[Any, Any], other: FakePool, other_cells: np.ndarray[Any, Any]) -> None:
        """`cells` become copies of `other_cells` of `other`; as many of them as there are cells."""
        chosen = other_cells[: len(cells)]
        self._position[cells] = other._position[chosen]
        self._before[cells], self._after[cells] = other._before[chosen], other._after[chosen]

    def spoil(self, cells: np.ndarray[Any, Any]) -> None:
        self._position[cells] = _SPOILT

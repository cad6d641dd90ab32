"""The cell table: which sequence's which position lives in which cell. Integers only; the bytes are an executor's.

A cell holds one token and never changes its index. A sequence owns an ordered list of cells (position -> cell); a
fork shares its parent's cells by reference count. No copy on write is needed: cells are only appended, and what two
sequences share is a prefix that neither of them writes again. The prefix index may keep a cell beyond its sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from planner.free_cells import FreeCells
from planner.growable import Growable
from planner.request import CellArray


class CellTable:
    """Owner of the list of cells of every sequence.

    Always free + owned + cached = capacity: a cell is *owned* while at least one sequence has it, *cached* while only
    the prefix index has it, else *free*. Free cells are handed out lowest first, so that the pool's used part stays
    short. Sequence ids ascend from 1 and are never used twice. A refusal changes nothing; an id that is not open
    raises KeyError.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = FreeCells(capacity)
        self._num_owners = np.zeros(capacity, np.int32)
        self._indexed = np.zeros(capacity, np.bool_)
        self._lists: dict[int, Growable[np.int32]] = {}
        self._next_id = 1
        self._num_cached = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> int:
        return self.capacity - self.free - self._num_cached

    @property
    def cached(self) -> int:
        return self._num_cached

    @property
    def used_end(self) -> int:
        """One past the highest cell that is not free."""
        return self._free.used_end

    def position(self, sequence: int) -> int:
        """Number of cells of a sequence: the position that its next token takes."""
        return len(self._lists[sequence])

    def cells(self, sequence: int) -> CellArray:
        """int32[position], read-only view: position i lives in cell `cells[i]`."""
        return self._lists[sequence].view()

    def open(self) -> int:
        """A new sequence without cells."""
        sequence = self._next_id
        self._next_id += 1
        self._lists[sequence] = Growable(np.empty(0, np.int32))
        return sequence

    def extend(self, wanted: Mapping[int, int]) -> bool:
        """Give each sequence as many more cells as `wanted` says, in its order; all of them or none.

        False, and nothing changed: fewer cells are free than wanted.
        """
        lists = [self._lists[sequence] for sequence in wanted]
        if min(wanted.values(), default=0) < 0:
            raise ValueError(f"a sequence cannot be extended by a negative number of cells: {dict(wanted)}")
        total = sum(wanted.values())
        if total > self.free:
            return False
        cells = self._free.take(total)
        self._num_owners[cells] = 1
        if max(wanted.values(), default=0) == 1 and total == len(lists):  # decodes alone: no array for each
            for own, cell in zip(lists, cells.tolist(), strict=True):
                own.append(cell)
            return True
        at = 0
        for own, count in zip(lists, wanted.values(), strict=True):
            own.extend(cells[at : at + count])
            at += count
        return True

    def fork(self, sequence: int, upto: int | None = None) -> int:
        """A new sequence that shares the cells of positions [0, upto); all of them by default. Takes no cell.

        Raises ValueError when `upto` lies beyond the sequence.
        """
        cells = self.cells(sequence)
        if upto is not None and not 0 <= upto <= len(cells):
            raise ValueError(f"cannot fork sequence {sequence} of {len(cells)} positions at {upto}")
        twin = self.open()
        self.adopt(twin, cells[:upto])
        return twin

    def adopt(self, sequence: int, cells: CellArray) -> None:
        """Start a sequence that has no cell yet from int32[n] distinct cells that are owned or cached."""
        own = self._lists[sequence]
        if len(own):
            raise ValueError(f"sequence {sequence} already has {len(own)} cells and cannot adopt others")
        unowned = self._num_owners[cells] == 0
        if not self._indexed[cells[unowned]].all():
            raise ValueError("a free cell cannot be adopted")
        self._num_cached -= int(np.count_nonzero(unowned))
        self._num_owners[cells] += 1
        own.extend(cells)

    def rewind(self, sequence: int, position: int) -> None:
        """Let go of the cells from `position` on; the sequence stays open, at 0 as well.

        Raises ValueError when `position` lies beyond the sequence.
        """
        own = self._lists[sequence]
        if not 0 <= position <= len(own):
            raise ValueError(f"cannot rewind sequence {sequence} of {len(own)} positions to {position}")
        tail = own.view(position)
        own.truncate(position)
        self._num_owners[tail] -= 1
        unowned = tail[self._num_owners[tail] == 0]
        kept = self._indexed[unowned]
        self._num_cached += int(np.count_nonzero(kept))
        self._free.put_back(unowned[~kept])

    def release(self, sequence: int) -> None:
        """Close a sequence and let go of all its cells."""
        self.rewind(sequence, 0)
        del self._lists[sequence]

    def retain(self, cells: CellArray) -> None:
        """The prefix index takes a reference to int32[n] owned cells that it has none of yet."""
        assert self._num_owners[cells].all(), "only a sequence's cells can enter the prefix index"
        assert not self._indexed[cells].any(), "a cell enters the prefix index once"
        self._indexed[cells] = True

    def forget(self, cells: CellArray) -> None:
        """The prefix index gives its reference to int32[n] cells back; those that no sequence owns become free."""
        assert self._indexed[cells].all(), "the prefix index can only forget what it retained"
        self._indexed[cells] = False
        unowned = cells[self._num_owners[cells] == 0]
        self._num_cached -= len(unowned)
        self._free.put_back(unowned)

    def unowned(self, cells: CellArray) -> npt.NDArray[np.bool_]:
        """bool[n]: which of int32[n] cells no sequence owns."""
        unowned: npt.NDArray[np.bool_] = self._num_owners[cells] == 0
        return unowned

    def shared(self, cells: CellArray) -> npt.NDArray[np.bool_]:
        """bool[n]: which of int32[n] cells more than one sequence owns and the prefix index refers to."""
        shared: npt.NDArray[np.bool_] = (self._num_owners[cells] > 1) & self._indexed[cells]
        return shared

    def lists(self) -> dict[int, CellArray]:
        """Read-only views of all sequences' cells, by sequence."""
        return {sequence: own.view() for sequence, own in self._lists.items()}

    def unfree(self) -> npt.NDArray[np.bool_]:
        """bool[capacity]: which cells a sequence or the prefix index refers to."""
        unfree: npt.NDArray[np.bool_] = (self._num_owners > 0) | self._indexed
        return unfree

    def check(self) -> None:
        """Verify every invariant, in O(capacity); for tests and debugging."""
        owners = np.zeros(self.capacity, np.int32)
        for sequence, own in self._lists.items():
            cells = own.view()
            assert len(np.unique(cells)) == len(cells), f"sequence {sequence} has a cell twice"
            np.add.at(owners, cells, 1)
        assert (owners == self._num_owners).all(), "reference counts differ from the sequences' lists"
        used = (owners > 0) | self._indexed
        free = np.flatnonzero(~used)
        assert np.array_equal(self._free.marks(), free), "the free cells are not those that nothing refers to"
        assert self._num_cached == np.count_nonzero(self._indexed & (owners == 0)), "miscounted cached cells"
        assert self.owned == np.count_nonzero(owners), "miscounted owned cells"
        assert len(self._free) == len(free), "miscounted free cells"
        assert self.used_end == (int(np.flatnonzero(used)[-1]) + 1 if used.any() else 0), "wrong used end"

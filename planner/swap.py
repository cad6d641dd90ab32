"""Blocks of host memory for the cells of preempted sequences. Integers only; the bytes are an executor's.

A sequence that gives its cells up either computes them again later or has them copied out and back. Which is cheaper
depends on how many cells nobody else holds: few of them are recomputed within a step that runs anyway. Not for the
order of copies: `planner.memory` hands them out with a step.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.free_cells import FreeCells
from planner.limits import Limits
from planner.request import CellArray


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Positions [first, end) of a sequence in host memory, block by block; `first` is a whole number of blocks.

    What comes before `first` was held by others as well when the copy was made, and is expected to be resident still.
    """

    blocks: CellArray
    first: int
    end: int

    @property
    def num_cells(self) -> int:
        return self.end - self.first


class HostBlocks:
    """Owner of the blocks, lowest first. A refusal changes nothing."""

    def __init__(self, limits: Limits) -> None:
        self.num_blocks = limits.swap_blocks
        self.block_cells = limits.swap_block_cells
        self._min_cells = limits.min_swapped_cells
        self._free = FreeCells(limits.swap_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_shared: int, end: int) -> HostCopy | None:
        """Blocks for positions up to `end` but for whole blocks of the first `num_shared`, which others hold as well.

        None where recomputing is the better way: too few cells are the sequence's own, or too few blocks are free.
        """
        first = num_shared // self.block_cells * self.block_cells
        num_blocks = -(-(end - first) // self.block_cells)
        if end - num_shared < self._min_cells or num_blocks > self.num_free:
            return None
        return HostCopy(self._free.take(num_blocks), first, end)

    def give_back(self, copy: HostCopy) -> None:
        self._free.put_back(copy.blocks)

    def num_usable(self, copy: HostCopy, num_resident: int) -> int | None:
        """Of `num_resident` leading positions found in the pool, those to share before the copy's blocks go on.

        None: what the copy builds on has gone, and it is worth nothing.
        """
        if num_resident < copy.first:
            return None
        return copy.first + (num_resident - copy.first) // self.block_cells * self.block_cells

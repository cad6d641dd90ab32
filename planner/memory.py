"""A worker's cells as the planner sees them: cell table, prefix index and host copies, kept in step with each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from planner.cells import CellTable
from planner.limits import Limits
from planner.metrics import Metrics
from planner.prefix import PrefixIndex
from planner.request import CellArray, TokenArray
from planner.sequence import Sequence
from planner.step import SwapIn, SwapOut
from planner.swap import HostBlocks, HostCopy


class Memory:
    """Owner of table, index and host blocks; gives cells to sequences and takes them back.

    Cached cells count as room: they are evicted as soon as somebody needs them. Copies to and from host memory that
    were decided on wait here for the step that carries them.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.table = CellTable(limits.capacity)
        self.prefixes = PrefixIndex(self.table, enabled=limits.prefix_caching)
        self._caching = limits.prefix_caching
        self._metrics = metrics
        self._dropped: list[int] = []
        self._blocks = HostBlocks(limits)
        self._leaving: list[SwapOut] = []
        self._returning: dict[Sequence, int] = {}  # running on cells that are to be filled from the host: from where

    @property
    def room(self) -> int:
        """Cells that could be given out: free and cached ones."""
        return self.table.free + self.table.cached

    def admit(self, sequence: Sequence, promised: int, *, certain: bool) -> bool:
        """Start a waiting sequence on the longest resident prefix of its tokens.

        False, and nothing but a worthless host copy is gone, when the room beyond `promised` cells does not hold the
        rest of its tokens and one more for each sequence it counts for; `certain` admits it anyway.
        """
        copy = sequence.host_copy
        if copy is not None:
            resident = self._shareable(sequence, copy)
            if resident is not None:
                return self._bring_back(sequence, copy, resident, promised, certain=certain)
            self.discard_copy(sequence)
        tokens = sequence.tokens.view()
        looks_up = self._caching and not sequence.family.needs_every_row(sequence)
        matched: CellArray = self.prefixes.match(tokens, sequence.root) if looks_up else np.empty(0, np.int32)
        room = self.room - promised - int(np.count_nonzero(self.table.unowned(matched)))
        if not certain and room < len(tokens) - len(matched) + sequence.num_slots:
            return False
        cells_id = self.table.open()
        self.table.adopt(cells_id, matched)
        sequence.start(cells_id, len(matched))
        if sequence.family.num_cached_tokens is None:
            sequence.family.num_cached_tokens = len(matched)
        if looks_up:
            self._metrics.num_prefix_queries += len(tokens)
            self._metrics.num_prefix_hits += len(matched)
        return True

    def claim(self, takes: Mapping[Sequence, int]) -> None:
        """Give each sequence as many more cells as it takes; the caller saw to it that there is room for all."""
        wanted = {sequence.cells_id: length for sequence, length in takes.items() if sequence.cells_id is not None}
        assert len(wanted) == len(takes), "only a running sequence takes cells"
        self.prefixes.evict(max(0, sum(wanted.values()) - self.table.free))
        assert self.table.extend(wanted), "a step was drafted beyond the room"

    def cells(self, sequence: Sequence) -> CellArray:
        """int32[position], read-only view of a running sequence's cells."""
        return self.table.cells(_cells_id(sequence))

    def fork(self, leader: Sequence, sequence: Sequence) -> None:
        """Start `sequence` on its leader's cells, all of the prompt but the last token: that one it draws from."""
        upto = sequence.num_prompt - 1
        sequence.start(self.table.fork(_cells_id(leader), upto), upto)

    def is_returning(self, sequence: Sequence) -> bool:
        """Whether its cells are still to be filled from the host."""
        return sequence in self._returning

    def receive(self, tokens: TokenArray, fill: Callable[[int, CellArray], None], root: int) -> int:
        """See `Planner.receive`."""
        resident = self.prefixes.match(np.append(tokens, -1), root) if self._caching else None
        if resident is None or len(resident) == len(tokens):
            return 0
        num_new = len(tokens) - len(resident)
        if num_new > self.room - int(np.count_nonzero(self.table.unowned(resident))):
            return 0
        cells_id = self.table.open()
        try:
            self.table.adopt(cells_id, resident)
            self.prefixes.evict(max(0, num_new - self.table.free))
            assert self.table.extend({cells_id: num_new}), "cached cells were room and are not"
            cells = self.table.cells(cells_id)
            fill(len(resident), cells[len(resident) :])
            self.prefixes.insert(tokens, cells, root)
        finally:
            self.table.release(cells_id)
        return num_new

    def publish(self, sequence: Sequence, length: int) -> None:
        """Make the first `length` tokens of a sequence, all committed, known to the prefix index."""
        assert length <= sequence.num_computed
        self.prefixes.insert(sequence.tokens.view(0, length), self.cells(sequence)[:length], sequence.root)

    def retire(self, sequence: Sequence, *, reusable: bool) -> None:
        """Take a sequence's cells back; what it committed stays known as a prefix if it is `reusable`."""
        if reusable and sequence not in self._returning:
            self.publish(sequence, sequence.num_computed)
        self.discard_copy(sequence)
        self._release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's cells away, with nothing in flight. What it committed goes to host memory, or else
        stays known as a prefix for as long as there is room, and the rest is to be recomputed."""
        cells_id = _cells_id(sequence)
        cells = self.table.cells(cells_id)[: sequence.num_computed]
        if sequence.host_copy is None:
            copy = self._blocks.take(self._num_shared(cells), len(cells))
            if copy is None:
                self.retire(sequence, reusable=True)
                return
            sequence.host_copy = copy
            self._leaving.append(SwapOut(cells[copy.first :].copy(), copy.blocks))
            self._metrics.num_swapped_out += 1
            self._metrics.num_cells_swapped_out += copy.num_cells
        self._returning.pop(sequence, None)
        self._release(sequence)

    def discard_copy(self, sequence: Sequence) -> None:
        """A sequence has no more use for its host copy, if it has one."""
        if sequence.host_copy is not None:
            self._blocks.give_back(sequence.host_copy)
            sequence.host_copy = None
            self._returning.pop(sequence, None)

    def take_swaps(self) -> tuple[tuple[SwapOut, ...], tuple[SwapIn, ...]]:
        """The copies out and back that were decided on since the last call; host blocks copied back are free again."""
        leaving, self._leaving = tuple(self._leaving), []
        returning = tuple(self._swap_in(sequence, start) for sequence, start in self._returning.items())
        for sequence in list(self._returning):
            self.discard_copy(sequence)
        return leaving, returning

    def take_dropped(self) -> tuple[int, ...]:
        """Ids of cell lists that went since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def clear(self) -> None:
        """The bytes are lost: forget what is cached, and the copies that no step has carried yet."""
        self.prefixes.clear()
        self._leaving.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Verify every invariant, in O(capacity), given all sequences that wait or run; for tests and debugging."""
        self.table.check()
        self.prefixes.check()
        copies = [sequence.host_copy for sequence in sequences if sequence.host_copy is not None]
        held = [block for copy in copies for block in copy.blocks.tolist()]
        assert len(set(held)) == len(held) == self._blocks.num_blocks - self._blocks.num_free, "host blocks are lost"

    def _shareable(self, sequence: Sequence, copy: HostCopy) -> CellArray | None:
        """Resident cells to start on before a host copy goes on; None where the copy is worth nothing."""
        resident: CellArray = np.empty(0, np.int32)
        if self._caching:
            resident = self.prefixes.match(sequence.tokens.view(0, copy.end + 1), sequence.root)
        num_usable = self._blocks.num_usable(copy, len(resident))
        return None if num_usable is None else resident[:num_usable]

    def _bring_back(
        self, sequence: Sequence, copy: HostCopy, resident: CellArray, promised: int, *, certain: bool
    ) -> bool:
        """As `admit`, on resident cells and new ones that the next step fills from the copy."""
        num_new = copy.end - len(resident)
        room = self.room - int(np.count_nonzero(self.table.unowned(resident)))
        if num_new > room:
            return False
        if not certain and room - promised < len(sequence.tokens) - len(resident) + sequence.num_slots:
            return False
        cells_id = self.table.open()
        self.table.adopt(cells_id, resident)
        self.prefixes.evict(max(0, num_new - self.table.free))
        assert self.table.extend({cells_id: num_new}), "cached cells were room and are not"
        sequence.start(cells_id, len(resident), num_new)
        self._returning[sequence] = len(resident)
        return True

    def _swap_in(self, sequence: Sequence, start: int) -> SwapIn:
        copy = sequence.host_copy
        assert copy is not None
        self._metrics.num_swapped_in += 1
        self._metrics.num_cells_swapped_in += copy.end - start
        skipped = (start - copy.first) // self._blocks.block_cells
        return SwapIn(_cells_id(sequence), copy.blocks[skipped:], self.cells(sequence)[start : copy.end])

    def _num_shared(self, cells: CellArray) -> int:
        """How many of a sequence's leading cells other sequences hold as well, and can be found again."""
        alone = np.flatnonzero(~self.table.shared(cells))
        if not self._caching:
            return 0
        return int(alone[0]) if len(alone) else len(cells)

    def _release(self, sequence: Sequence) -> None:
        cells_id = _cells_id(sequence)
        self.table.release(cells_id)
        self._dropped.append(cells_id)
        sequence.cells_id = None
        sequence.num_computed = sequence.num_planned = 0


def _cells_id(sequence: Sequence) -> int:
    assert sequence.cells_id is not None, "only a running sequence has cells"
    return sequence.cells_id

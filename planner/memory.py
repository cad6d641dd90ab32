"""A worker's cells as the planner sees them: the cell table and the prefix index, kept in step with each other."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.cells import CellTable
from planner.limits import Limits
from planner.metrics import Metrics
from planner.prefix import PrefixIndex
from planner.request import CellArray
from planner.sequence import Sequence


class Memory:
    """Owner of table and index; gives cells to sequences and takes them back.

    Cached cells count as room: they are evicted as soon as somebody needs them.
    """

    def __init__(self, limits: Limits, metrics: Metrics) -> None:
        self.table = CellTable(limits.capacity)
        self.prefixes = PrefixIndex(self.table, enabled=limits.prefix_caching)
        self._caching = limits.prefix_caching
        self._metrics = metrics
        self._dropped: list[int] = []

    @property
    def room(self) -> int:
        """Cells that could be given out: free and cached ones."""
        return self.table.free + self.table.cached

    def admit(self, sequence: Sequence, promised: int, *, certain: bool) -> bool:
        """Start a waiting sequence on the longest resident prefix of its tokens.

        False, and nothing changed, when the room beyond `promised` cells does not hold the rest of its tokens and one
        more for each sequence it counts for; `certain` admits it anyway.
        """
        tokens = sequence.tokens.view()
        looks_up = self._caching and not sequence.family.owes_prompt_logprobs(sequence)
        matched: CellArray = self.prefixes.match(tokens) if looks_up else np.empty(0, np.int32)
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
        wanted = {_cells_id(sequence): length for sequence, length in takes.items()}
        self.prefixes.evict(max(0, sum(wanted.values()) - self.table.free))
        assert self.table.extend(wanted), "a step was drafted beyond the room"

    def cells(self, sequence: Sequence) -> CellArray:
        """int32[position], read-only view of a running sequence's cells."""
        return self.table.cells(_cells_id(sequence))

    def fork(self, leader: Sequence, sequence: Sequence) -> None:
        """Start `sequence` on its leader's cells, all of the prompt but the last token: that one it draws from."""
        upto = sequence.num_prompt - 1
        sequence.start(self.table.fork(_cells_id(leader), upto), upto)

    def publish(self, sequence: Sequence, length: int) -> None:
        """Make the first `length` tokens of a sequence, all committed, known to the prefix index."""
        assert length <= sequence.num_computed
        self.prefixes.insert(sequence.tokens.view(0, length), self.cells(sequence)[:length])

    def retire(self, sequence: Sequence, *, reusable: bool) -> None:
        """Take a sequence's cells back; what it committed stays known as a prefix if it is `reusable`."""
        cells_id = _cells_id(sequence)
        if reusable:
            self.publish(sequence, sequence.num_computed)
        self.table.release(cells_id)
        self._dropped.append(cells_id)
        sequence.cells_id = None
        sequence.num_computed = sequence.num_planned = 0

    def take_dropped(self) -> tuple[int, ...]:
        """Ids of cell lists that went since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def check(self) -> None:
        """Verify every invariant, in O(capacity); for tests and debugging."""
        self.table.check()
        self.prefixes.check()


def _cells_id(sequence: Sequence) -> int:
    assert sequence.cells_id is not None, "only a running sequence has cells"
    return sequence.cells_id

"""Which worker holds which prefixes, as far as one gateway knows: told by the workers, or expected of what it sent.

One table for all workers, from a block's name (`planner.blocks`) to the workers that have it, so that the search for
a prompt takes as many look-ups as the prompt has blocks, however many workers there are. Not for deciding anything.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.blocks import BLOCK_TOKENS, MAX_RESIDENT_BLOCKS, BlockChanges

MAX_INDEXED_BLOCKS = 2**19
"""Of all workers together: thirty million tokens of distinct prefixes, in about 150 MB at most."""

_FEW = 16
"""Up to so many bits of a mask are found one by one; more are unpacked all at once."""


@dataclass(slots=True)
class _Holder:
    """One worker. `told` has what it said it holds, the least recently wanted first; `expected` counts the requests
    on their way to it that will leave a prefix there."""

    bit: int
    told: OrderedDict[int, None] = field(default_factory=OrderedDict)
    expected: Counter[int] = field(default_factory=Counter)


class ResidentIndex:
    """Owner: the router. A worker is known by its row, a small number.

    Bounded: a worker has at most its share of `max_blocks`, told and expected each; the prefixes that were not wanted
    for longest are forgotten first, and of one chain the longest.
    """

    def __init__(self, max_blocks: int = MAX_INDEXED_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, _Holder] = {}
        self._masks: dict[int, int] = {}  # bit r is set: row r has it, or is expected to

    def __len__(self) -> int:
        """Distinct blocks that some worker has."""
        return len(self._masks)

    def open(self, row: int) -> None:
        """A worker came, of which nothing is known yet."""
        self._holders[row] = _Holder(1 << row)
        for holder in self._holders.values():
            self._trim(holder)

    def close(self, row: int) -> None:
        """The worker went, and all that was known of it."""
        holder = self._holders.pop(row)
        for name in {*holder.told, *holder.expected}:
            self._clear(name, holder.bit)

    def learn(self, row: int, changes: BlockChanges) -> None:
        """Take in a worker's news of what it holds."""
        holder = self._holders[row]
        for name in changes.removed:
            if name in holder.told:
                del holder.told[name]
                self._unless_held(name, holder)
        for name in changes.added:
            holder.told[name] = None
            self._set(name, holder.bit)
        self._trim(holder)

    def expect(self, row: int, names: Sequence[int]) -> int:
        """A request with this chain of blocks goes to the worker; as many of them as there is room for are expected
        there from now on. Returns how many, to be given to `settle`."""
        holder = self._holders[row]
        for name in reversed(names):
            if name in holder.told:
                holder.told.move_to_end(name)
        num_expected = min(len(names), max(0, self._share - len(holder.expected)))
        for name in names[:num_expected]:
            holder.expected[name] += 1
            self._set(name, holder.bit)
        return num_expected

    def settle(self, row: int, names: Iterable[int]) -> None:
        """These names are expected by one request less; what it left there, the worker has told."""
        holder = self._holders[row]
        for name in names:
            holder.expected[name] -= 1
            if not holder.expected[name]:
                del holder.expected[name]
                self._unless_held(name, holder)

    def cached_tokens(self, names: Sequence[int], num_rows: int) -> npt.NDArray[np.int64]:
        """int64[num_rows]: tokens of the longest prefix of a chain of blocks that each worker has."""
        cached = np.zeros(num_rows, np.int64)
        found = 0
        for num_blocks in range(len(names), 0, -1):
            new = self._masks.get(names[num_blocks - 1], 0) & ~found
            if new:
                found |= new
                cached[_rows(new)] = num_blocks * BLOCK_TOKENS
        return cached

    @property
    def _share(self) -> int:
        return min(MAX_RESIDENT_BLOCKS, self._max_blocks // max(1, len(self._holders)))

    def _trim(self, holder: _Holder) -> None:
        while len(holder.told) > self._share:
            name, _ = holder.told.popitem(last=False)
            self._unless_held(name, holder)

    def _set(self, name: int, bit: int) -> None:
        mask = self._masks.get(name)
        self._masks[name] = bit if mask is None else mask | bit

    def _unless_held(self, name: int, holder: _Holder) -> None:
        if name not in holder.told and name not in holder.expected:
            self._clear(name, holder.bit)

    def _clear(self, name: int, bit: int) -> None:
        mask = self._masks[name] & ~bit
        if mask:
            self._masks[name] = mask
        else:
            del self._masks[name]


def _rows(mask: int) -> npt.NDArray[np.intp] | list[int]:
    """The positions of a mask's bits."""
    if mask.bit_count() > _FEW:
        data = mask.to_bytes(-(-mask.bit_length() // 8), "little")
        return np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little"))
    rows = []
    while mask:
        rows.append(mask.bit_length() - 1)
        mask ^= 1 << rows[-1]
    return rows

"""Prefixes by name: chained hashes of blocks of tokens, and the news of which of them a pool holds.

A prefix of k blocks is known by the hash of its k-th block, which covers all tokens before it. The names are hints
for whoever chooses a worker: a prefix is found in the pool token by token (`planner.prefix`), never by its hash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from planner.request import BASE_ROOT, TokenArray

BLOCK_TOKENS = 64
MAX_RESIDENT_BLOCKS = 2**15
"""Of one worker; two million tokens of distinct prefixes."""

_BLOCK_BYTES = 4 * BLOCK_TOKENS
_HASH_BYTES = 8


def block_hashes(tokens: TokenArray, parent: int = BASE_ROOT) -> list[int]:
    """The 64-bit names of the whole blocks of int64[n] tokens, which follow the block that is called `parent`; the
    first of a prompt follow its `Request.root`.

    Each is BLAKE2b (Aumasson et al. 2013; RFC 7693) of its parent's name and its tokens as int32, so equal names mean
    equal prefixes, all but surely, on any machine.
    """
    num_blocks = len(tokens) // BLOCK_TOKENS
    data = tokens[: num_blocks * BLOCK_TOKENS].astype("<i4").tobytes()
    name = parent.to_bytes(_HASH_BYTES, "little")
    hashes = []
    for at in range(0, len(data), _BLOCK_BYTES):
        name = blake2b(name + data[at : at + _BLOCK_BYTES], digest_size=_HASH_BYTES).digest()
        hashes.append(int.from_bytes(name, "little"))
    return hashes


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Names that became resident, and names that are so no more; none is in both."""

    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed)


class BlockNews:
    """Changes that one reader has not heard of yet; what came and went meanwhile is no news.

    Bounded by what is resident and what the reader believes to be, however long it does not listen.
    """

    def __init__(self) -> None:
        self._added: dict[int, None] = {}
        self._removed: dict[int, None] = {}

    def __bool__(self) -> bool:
        return bool(self._added or self._removed)

    def note(self, changes: BlockChanges) -> None:
        for name in changes.removed:
            self._note(name, self._added, self._removed)
        for name in changes.added:
            self._note(name, self._removed, self._added)

    def take(self, most: int) -> BlockChanges:
        """Give out up to `most` names of each kind, the earliest first."""
        return BlockChanges(_take(self._added, most), _take(self._removed, most))

    @staticmethod
    def _note(name: int, undone: dict[int, None], news: dict[int, None]) -> None:
        if name in undone:
            del undone[name]
        else:
            news[name] = None


class ResidentBlocks:
    """The names of the prefixes that are resident, and what changed since it was last asked. Owner: the prefix index.

    At most `capacity` names are kept: beyond that the one that came first is dropped, as if it had been evicted.
    """

    def __init__(self, capacity: int = MAX_RESIDENT_BLOCKS) -> None:
        self._capacity = capacity
        self._names: OrderedDict[int, None] = OrderedDict()
        self._news = BlockNews()

    def __len__(self) -> int:
        return len(self._names)

    def add(self, names: Iterable[int]) -> None:
        """A chain of names became resident, shortest prefix first; the longest counts as the one that came first."""
        added = tuple(name for name in reversed(list(names)) if name not in self._names)
        self._names.update(dict.fromkeys(added))
        self._news.note(BlockChanges(added=added))
        surplus = max(0, len(self._names) - self._capacity)
        dropped = tuple(self._names.popitem(last=False)[0] for _ in range(surplus))
        self._news.note(BlockChanges(removed=dropped))

    def remove(self, names: Iterable[int]) -> None:
        """Names are resident no more; those that were dropped before are passed over."""
        removed = tuple(name for name in names if name in self._names)
        for name in removed:
            del self._names[name]
        self._news.note(BlockChanges(removed=removed))

    def take_changes(self) -> BlockChanges:
        """What changed since the last call."""
        return self._news.take(2 * self._capacity)

    @property
    def everything(self) -> BlockChanges:
        """All that is resident, as news for whoever knows nothing yet."""
        return BlockChanges(added=tuple(self._names))


def _take(names: dict[int, None], most: int) -> tuple[int, ...]:
    taken = tuple(islice(names, most))
    if len(taken) == len(names):
        names.clear()  # deleted one by one, they would leave a table that each later look walks through
    else:
        for name in taken:
            del names[name]
    return taken

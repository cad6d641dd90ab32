"""The prefix index, with the values of semantics section 11 (statements 78-83)."""

from __future__ import annotations

import numpy as np
import pytest

from planner.cells import CellTable
from planner.prefix import PrefixIndex


class Pool:
    """A table and an index, driven as the planner drives them."""

    def __init__(self, capacity: int = 32, *, enabled: bool = True) -> None:
        self.table = CellTable(capacity)
        self.index = PrefixIndex(self.table, enabled=enabled)

    def match(self, tokens: list[int]) -> list[int]:
        return [int(cell) for cell in self.index.match(np.array(tokens, np.int64))]

    def run(self, tokens: list[int], *, ends: bool = True) -> int:
        """A sequence of these tokens is computed on what is known, is committed, and ends unless it shall live on."""
        sequence = self.table.open()
        matched = self.index.match(np.array(tokens, np.int64))
        self.table.adopt(sequence, matched)
        assert self.table.extend({sequence: len(tokens) - len(matched)})
        self.index.insert(np.array(tokens, np.int64), self.table.cells(sequence))
        if ends:
            self.table.release(sequence)
        self.check()
        return sequence

    def check(self) -> None:
        self.table.check()
        self.index.check()


@pytest.mark.parametrize(
    ("request_tokens", "num_matched"),
    [
        ([1, 2, 3, 4, 5, 6], 5),
        ([1, 2, 3, 4], 3),
        ([1, 2, 3, 4, 5, 6, 7, 8], 6),
        ([], 0),
        ([1], 0),
        ([9, 2, 3], 0),
        ([1, 2, 9], 2),
    ],
)
def test_a_match_leaves_the_last_token_to_compute(request_tokens: list[int], num_matched: int) -> None:
    pool = Pool()
    pool.run([1, 2, 3, 4, 5, 6])
    assert pool.match(request_tokens) == [0, 1, 2, 3, 4, 5][:num_matched]


def test_the_longest_prefix_wins_however_old() -> None:
    pool = Pool()
    pool.run([1, 2, 3, 4, 5])
    pool.run([1, 2, 9])
    assert len(pool.match([1, 2, 3, 4, 5, 6])) == 5


def test_sharers_of_a_prefix_share_its_cells() -> None:
    pool = Pool()
    pool.run([1, 2, 3, 4])
    pool.run([1, 2, 7, 8])
    pool.run([1, 2, 7, 9])
    assert pool.table.cached == 4 + 2 + 1
    assert pool.match([1, 2, 7, 9, 0]) == [0, 1, 4, 6]


def test_evicting_a_prefix_does_not_hurt_a_sequence_that_has_it() -> None:
    pool = Pool()
    pool.run([1, 2, 3, 4])
    sequence = pool.run([1, 2, 3, 4, 5], ends=False)
    assert pool.table.cached == 0
    assert pool.index.evict(32) == 0
    assert pool.table.cells(sequence).tolist() == [0, 1, 2, 3, 4]
    pool.check()


def test_a_duplicate_refreshes_recency_and_keeps_no_cell_of_its_own() -> None:
    pool = Pool()
    pool.run([1, 2])
    pool.run([3, 4])
    twin = pool.table.open()
    assert pool.table.extend({twin: 2})
    pool.index.insert(np.array([1, 2], np.int64), pool.table.cells(twin))
    pool.table.release(twin)
    assert (pool.table.cached, pool.table.free) == (4, 28)
    assert pool.index.evict(2) == 2
    assert pool.match([3, 4, 0]) == []
    assert pool.match([1, 2, 0]) == [0, 1]


def test_a_match_refreshes_recency() -> None:
    pool = Pool()
    pool.run([1, 2])
    pool.run([3, 4])
    pool.match([1, 2, 0])
    assert pool.index.evict(1) == 1
    assert len(pool.match([1, 2, 0])) == 2
    assert len(pool.match([3, 4, 0])) == 1


def test_a_disabled_index_remembers_nothing() -> None:
    pool = Pool(enabled=False)
    pool.run([1, 2, 3])
    assert pool.match([1, 2, 3]) == []
    assert (pool.table.free, pool.table.cached) == (32, 0)


def test_eviction_trims_a_leaf_from_its_end_and_no_more_than_asked() -> None:
    pool = Pool()
    pool.run([1, 2, 3, 4, 5, 6])
    assert pool.index.evict(2) == 2
    pool.check()
    assert pool.match([1, 2, 3, 4, 5, 6, 7]) == [0, 1, 2, 3]
    assert (pool.table.cached, pool.table.free) == (4, 28)
    assert pool.index.evict(0) == 0


def test_eviction_goes_on_to_the_parent_when_its_last_leaf_is_gone() -> None:
    pool = Pool()
    pool.run([1, 2, 3])
    pool.run([1, 2, 4])
    assert pool.index.evict(3) == 3
    assert pool.match([1, 2, 3]) == [0]
    assert pool.index.evict(9) == 1
    assert pool.table.free == 32


def test_eviction_skips_what_sequences_own() -> None:
    pool = Pool()
    pool.run([1, 2, 3], ends=False)
    pool.run([5, 6, 7])
    assert pool.index.evict(9) == 3
    assert pool.match([1, 2, 3, 4]) == [0, 1, 2]
    assert pool.match([5, 6, 7, 8]) == []


def test_an_owned_leaf_does_not_shelter_the_cached_cells_above_it() -> None:
    """Two sequences compute [1, 2] at the same time; the one that is not known goes on, the other one ends."""
    pool = Pool(8)
    first, second, other = pool.table.open(), pool.table.open(), pool.table.open()
    assert pool.table.extend({first: 2, second: 3, other: 1})
    pool.index.insert(np.array([9], np.int64), pool.table.cells(other))
    pool.index.insert(np.array([1, 2], np.int64), pool.table.cells(first))
    pool.index.insert(np.array([1, 2, 3], np.int64), pool.table.cells(second))
    pool.table.release(first)
    assert (pool.table.cached, pool.table.owned) == (2, 4)
    assert pool.index.evict(2) == 2
    pool.check()
    assert pool.match([1, 2, 3, 4]) == []
    assert pool.match([9, 9]) == [5]
    assert pool.table.cells(second).tolist() == [2, 3, 4]


def test_only_the_owned_end_of_a_sheltering_leaf_is_forgotten() -> None:
    pool = Pool(8)
    first, second = pool.table.open(), pool.table.open()
    assert pool.table.extend({first: 3})
    pool.index.insert(np.array([1, 2, 3], np.int64), pool.table.cells(first))
    # `second` owns the leaf's end only, which no planner does; the index must still find the cached part before it.
    pool.table.adopt(second, pool.table.cells(first)[2:])
    pool.table.release(first)
    assert pool.index.evict(1) == 1
    pool.check()
    assert pool.match([1, 2, 3, 4]) == [0]


def test_clearing_frees_what_nobody_owns() -> None:
    pool = Pool()
    pool.run([1, 2, 3])
    pool.run([1, 2, 4], ends=False)
    pool.index.clear()
    pool.check()
    assert (pool.table.free, pool.table.owned, pool.table.cached) == (29, 3, 0)
    assert pool.match([1, 2, 3, 4]) == []
    pool.run([1, 2, 3])
    assert len(pool.match([1, 2, 3, 4])) == 3


def test_a_prefix_that_comes_back_is_known_again() -> None:
    pool = Pool(6)
    for _ in range(5):
        pool.run([1, 2, 3])
        assert len(pool.match([1, 2, 3, 4])) == 3
        assert pool.index.evict(3) == 3
    assert pool.table.free == 6

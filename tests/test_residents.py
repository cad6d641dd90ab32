"""A gateway's table of what is resident where: right, bounded, and gone with its worker."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.routing.residents import ResidentIndex
from planner.blocks import BLOCK_TOKENS, BlockChanges

CHAINS = ((1, 2, 3), (1, 2, 4), (5,))
NUM_ROWS = 3


def index_of(num_rows: int = NUM_ROWS, max_blocks: int = 1000) -> ResidentIndex:
    index = ResidentIndex(max_blocks)
    for row in range(num_rows):
        index.open(row)
    return index


def cached(index: ResidentIndex, *names: int, num_rows: int = NUM_ROWS) -> list[int]:
    return (index.cached_tokens(names, num_rows) // BLOCK_TOKENS).tolist()


def test_the_longest_prefix_of_each_worker_counts() -> None:
    index = index_of()
    index.learn(0, BlockChanges(added=(1,)))
    index.learn(2, BlockChanges(added=(3, 2, 1)))
    assert cached(index, 1, 2, 3, 4) == [1, 0, 3]
    assert cached(index, 9) == cached(index) == [0, 0, 0]


def test_many_workers_with_one_prefix_are_all_found() -> None:
    index = index_of(100)
    for row in range(0, 100, 2):
        index.learn(row, BlockChanges(added=(1,)))
    index.learn(51, BlockChanges(added=(1, 2)))
    expected = [2 if row == 51 else 1 - row % 2 for row in range(100)]
    assert cached(index, 1, 2, num_rows=100) == expected


def test_what_two_requests_are_expected_to_leave_goes_when_both_are_settled() -> None:
    index = index_of()
    assert index.expect(1, (1, 2)) == index.expect(1, (1, 2)) == 2
    index.settle(1, (1, 2))
    assert cached(index, 1, 2) == [0, 2, 0]
    index.settle(1, (1, 2))
    assert (cached(index, 1, 2), len(index)) == ([0, 0, 0], 0)


def test_a_million_distinct_prefixes_do_not_grow_the_table() -> None:
    index = index_of(2, max_blocks=64)
    for name in range(10_000):
        index.learn(name % 2, BlockChanges(added=(name,)))
        index.expect(name % 2, (name + 20_000,))
    assert len(index) <= 2 * 64


def test_the_prefix_that_was_not_wanted_for_longest_is_forgotten_first() -> None:
    index = index_of(1, max_blocks=4)
    index.learn(0, BlockChanges(added=(2, 1)))
    index.learn(0, BlockChanges(added=(6, 5)))
    index.settle(0, (1, 2)[: index.expect(0, (1, 2))])
    index.learn(0, BlockChanges(added=(8, 7)))
    assert [cached(index, *chain, num_rows=1) for chain in ((1, 2), (5, 6), (7, 8))] == [[2], [0], [2]]


def test_more_workers_leave_each_a_smaller_share() -> None:
    index = index_of(1, max_blocks=8)
    index.learn(0, BlockChanges(added=tuple(range(8))))
    assert len(index) == 8
    index.open(1)
    assert len(index) == 4


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_table_says_what_a_naive_one_would(data: st.DataObject) -> None:
    index = index_of()
    told: list[set[int]] = [set() for _ in range(NUM_ROWS)]
    expected: list[Counter[int]] = [Counter() for _ in range(NUM_ROWS)]
    on_their_way: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(data.draw(st.integers(0, 20))):
        row, chain = data.draw(st.integers(0, NUM_ROWS - 1)), data.draw(st.sampled_from(CHAINS))
        match data.draw(st.sampled_from(("add", "remove", "expect", "settle", "restart"))):
            case "add":
                index.learn(row, BlockChanges(added=chain))
                told[row] |= set(chain)
            case "remove":
                index.learn(row, BlockChanges(removed=chain[-1:]))
                told[row] -= set(chain[-1:])
            case "expect":
                assert index.expect(row, chain) == len(chain)
                expected[row].update(chain)
                on_their_way.append((row, chain))
            case "settle" if on_their_way:
                row, chain = on_their_way.pop(0)
                index.settle(row, chain)
                expected[row].subtract(chain)
            case "restart":
                index.close(row)
                index.open(row)
                told[row], expected[row] = set(), Counter()
                on_their_way = [item for item in on_their_way if item[0] != row]
        held = [told[row] | set(+expected[row]) for row in range(NUM_ROWS)]
        assert len(index) == len(set().union(*held))
        for chain in CHAINS:
            longest = [
                max((n for n in range(len(chain) + 1) if n and chain[n - 1] in held[r]), default=0)
                for r in range(NUM_ROWS)
            ]
            assert np.array_equal(cached(index, *chain), longest)

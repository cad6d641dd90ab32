"""Names of prefixes, and the news of which are resident."""

from __future__ import annotations

import time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.blocks import BLOCK_TOKENS, BlockChanges, BlockNews, ResidentBlocks, block_hashes
from planner.cells import CellTable
from planner.prefix import PrefixIndex
from planner.request import TokenArray
from tests.fakes import fake_request
from tests.planner_life import new_life


def ids(length: int, seed: int = 0) -> TokenArray:
    return np.random.default_rng(seed).integers(0, 100, length)


class Reader:
    """Somebody who believes the changes that he is given."""

    def __init__(self) -> None:
        self.known: set[int] = set()

    def read(self, changes: BlockChanges) -> None:
        assert self.known.isdisjoint(changes.added)
        assert self.known.issuperset(changes.removed)
        self.known = (self.known | set(changes.added)) - set(changes.removed)


def test_a_name_covers_all_tokens_before_it() -> None:
    tokens = ids(3 * BLOCK_TOKENS + 5)
    names = block_hashes(tokens)
    assert len(set(names)) == 3
    changed = tokens.copy()
    changed[BLOCK_TOKENS] += 1
    assert [a == b for a, b in zip(names, block_hashes(changed), strict=True)] == [True, False, False]
    assert block_hashes(tokens[BLOCK_TOKENS:], names[0]) == names[1:]
    assert block_hashes(tokens[: BLOCK_TOKENS - 1]) == []


def test_names_are_the_same_on_every_machine() -> None:
    """The value is fixed: workers and gateways of different versions must agree on it."""
    assert block_hashes(np.arange(BLOCK_TOKENS)) == block_hashes(np.arange(BLOCK_TOKENS, dtype=np.int32))
    assert block_hashes(np.arange(2 * BLOCK_TOKENS)) == [9711419153642480206, 10708782958815112529]


def test_a_long_prompt_is_named_in_milliseconds() -> None:
    tokens = ids(100_000)
    times = []
    for _ in range(5):
        begun_at = time.perf_counter()
        block_hashes(tokens)
        times.append(time.perf_counter() - begun_at)
    assert min(times) < 0.02  # an idle core takes 3 ms


def test_beyond_the_bound_the_first_to_come_is_dropped_and_of_a_chain_the_longest() -> None:
    blocks, reader = ResidentBlocks(capacity=4), Reader()
    blocks.add([1, 2])
    blocks.add([3, 4])
    blocks.add([5])
    reader.read(blocks.take_changes())
    assert reader.known == {1, 3, 4, 5} == set(blocks.everything.added)
    blocks.remove([2, 1])
    reader.read(blocks.take_changes())
    assert reader.known == {3, 4, 5}
    assert len(blocks) == 3
    assert not blocks.take_changes()


@given(st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 9), min_size=1)), max_size=20), st.data())
def test_whoever_reads_the_news_late_and_in_pieces_knows_the_same_in_the_end(
    changes: list[tuple[bool, set[int]]], data: st.DataObject
) -> None:
    blocks, news, reader = ResidentBlocks(capacity=6), BlockNews(), Reader()
    for adds, names in changes:
        (blocks.add if adds else blocks.remove)(sorted(names))
        news.note(blocks.take_changes())
        if data.draw(st.booleans()):
            reader.read(news.take(data.draw(st.integers(0, 3))))
    while news:
        reader.read(news.take(2))
    assert reader.known == set(blocks.everything.added)


def test_splitting_and_trimming_the_tree_keeps_the_names_right() -> None:
    table, reader = CellTable(2000), Reader()
    index = PrefixIndex(table)
    base = ids(300)
    for tail, cut in ((1, 300), (2, 200), (3, 65), (4, 64), (5, 63), (6, 192)):
        tokens = np.concatenate([base[:cut], ids(150, seed=tail)])
        sequence = table.open()
        matched = index.match(tokens)
        table.adopt(sequence, matched)
        assert table.extend({sequence: len(tokens) - len(matched)})
        index.insert(tokens, table.cells(sequence))
        table.release(sequence)
        index.check()
        reader.read(index.blocks.take_changes())
        assert reader.known.issuperset(block_hashes(tokens))
    while table.cached:
        index.evict(37)
        index.check()
        reader.read(index.blocks.take_changes())
    assert reader.known == set()


def test_a_planner_tells_of_a_prompt_when_it_is_committed_and_of_its_end_when_it_is_evicted() -> None:
    life = new_life(capacity=256, context=256)
    asked = fake_request(range(100), 2)
    life.submit(asked)
    life.turn()
    assert not life.planner.blocks.take_changes()
    life.finish()
    assert life.planner.blocks.take_changes().added == tuple(block_hashes(asked.prompt))
    life.submit(fake_request([0] * 250, 2))
    life.finish()
    changes = life.planner.blocks.take_changes()
    assert changes.removed == tuple(block_hashes(asked.prompt))
    assert set(changes.added) == set(block_hashes(np.zeros(250, np.int64)))
    life.lose_the_executor()
    assert len(life.planner.blocks) == 0


def test_without_prefix_caching_there_is_nothing_to_tell() -> None:
    life = new_life(capacity=256, context=256, prefix_caching=False)
    life.submit(fake_request(range(100), 2))
    life.finish()
    assert not life.planner.blocks.take_changes()

"""Cells that were computed with one adapter are never found by another one, nor by the model itself."""

from __future__ import annotations

import numpy as np

from planner.blocks import BLOCK_TOKENS, block_hashes
from planner.cells import CellTable
from planner.prefix import PrefixIndex
from planner.request import Adapter, Update
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_limits, fake_request
from tests.turns import Turns

PIRATE, POET = Adapter("pirate", 2**63 + 11), Adapter("poet", 12)
PROMPT = tuple(range(1, 150))


class Life(Turns[FakeExecutor]):
    """A planner and a fake executor that finds a wrong cell at the step that reads it."""

    def __init__(self, capacity: int = 4096) -> None:
        info = fake_info(num_cells=capacity)
        super().__init__(fake_limits(info), FakeExecutor(info))

    def last_word(self, adapter: Adapter | None) -> Update:
        """The last update of the prompt's answer, which must be what it would be alone."""
        request = fake_request(PROMPT, adapter=adapter)
        ((*_, last),) = updates = self.updates([request])
        assert tuple(token for update in updates[0] for token in update.tokens) == expected_tokens(request)
        return last


def test_a_prompt_is_computed_once_for_each_adapter_and_once_for_the_model() -> None:
    life = Life()
    for adapter in (None, PIRATE, POET):
        assert life.last_word(adapter).num_cached_tokens == 0
    for adapter in (PIRATE, None, POET):
        assert life.last_word(adapter).num_cached_tokens == len(PROMPT) - 1


def test_an_adapter_under_the_same_name_with_other_matrices_finds_nothing() -> None:
    life = Life()
    life.last_word(PIRATE)
    assert life.last_word(PIRATE._replace(revision=99)).num_cached_tokens == 0


def test_what_one_adapter_left_is_evicted_for_another() -> None:
    life = Life(capacity=len(PROMPT) + 20)
    for adapter in (PIRATE, POET, PIRATE, None):
        assert life.last_word(adapter).num_cached_tokens <= 20  # the room that was left beside the other's


def test_cells_that_move_to_another_pool_stay_those_of_their_adapter() -> None:
    source, target = Life(), Life()
    request_id = source.planner.submit(fake_request(PROMPT, max_tokens=9, adapter=PIRATE))
    for _ in range(6):
        source.turn()
    held = source.planner.held(request_id)
    assert held is not None
    assert held.root == PIRATE.revision
    tokens = held.tokens.copy()
    assert target.planner.receive(tokens, lambda start, cells: None, held.root) == len(tokens)
    asked = fake_request(PROMPT)
    target.planner.submit(asked)
    (chunk,) = target.planner.plan().chunks  # type: ignore[union-attr]
    assert chunk.start == 0, "the model itself found an adapter's cells"
    target.planner.cancel_all()
    target.planner.check()


def test_a_tree_that_was_evicted_leaves_nothing_behind() -> None:
    table = CellTable(8)
    index = PrefixIndex(table)
    cells_id = table.open()
    table.extend({cells_id: 3})
    index.insert(np.array([1, 2, 3]), table.cells(cells_id), POET.revision)
    table.release(cells_id)
    assert index.evict(3) == 3
    assert not index.match(np.array([1, 2, 3]), POET.revision).size
    index.check()
    assert table.free == 8
    assert index._roots == {}


def test_blocks_of_different_adapters_have_different_names() -> None:
    tokens = np.array(PROMPT)
    names = {name for root in (0, PIRATE.revision, POET.revision) for name in block_hashes(tokens, root)}
    assert len(names) == 3 * (len(PROMPT) // BLOCK_TOKENS)


def test_a_worker_tells_the_names_that_a_gateway_looks_for() -> None:
    life = Life()
    life.last_word(PIRATE)
    assert set(life.planner.blocks.everything.added) >= set(block_hashes(np.array(PROMPT[:-1]), PIRATE.revision))
    assert not set(life.planner.blocks.everything.added) & set(block_hashes(np.array(PROMPT)))

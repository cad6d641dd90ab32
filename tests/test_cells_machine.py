"""Random verbs on the cell table and the prefix index, against models of sets and dictionaries."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from planner.cells import CellTable
from planner.prefix import PrefixIndex
from tests.strategies import UNHURRIED

CAPACITY = 16


class CellMachine(RuleBasedStateMachine):
    """The model: a list of cells for each open sequence, the set of indexed cells; everything else follows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CellTable(CAPACITY)
        self.lists: dict[int, list[int]] = {}
        self.indexed: set[int] = set()
        self.num_opened = 0

    @property
    def owned(self) -> set[int]:
        return {cell for own in self.lists.values() for cell in own}

    @property
    def free(self) -> list[int]:
        return sorted(set(range(CAPACITY)) - self.owned - self.indexed)

    def note_open(self, sequence: int, cells: list[int]) -> None:
        self.num_opened += 1
        assert sequence == self.num_opened
        self.lists[sequence] = cells

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lists)), "sequence")

    @rule()
    def open(self) -> None:
        self.note_open(self.table.open(), [])

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        wanted = data.draw(st.dictionaries(st.sampled_from(sorted(self.lists)), st.integers(0, 5)), "wanted")
        free = self.free
        fits = sum(wanted.values()) <= len(free)
        assert self.table.extend(wanted) is fits
        if fits:
            for sequence, count in wanted.items():
                self.lists[sequence] += [free.pop(0) for _ in range(count)]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        upto = data.draw(st.none() | st.integers(0, len(self.lists[sequence])), "upto")
        self.note_open(self.table.fork(sequence, upto), self.lists[sequence][:upto])

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        position = data.draw(st.integers(0, len(self.lists[sequence])), "position")
        self.table.rewind(sequence, position)
        del self.lists[sequence][position:]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.table.release(sequence)
        del self.lists[sequence]

    @precondition(lambda self: self.owned - self.indexed)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.owned - self.indexed))), "cells")
        self.table.retain(np.array(sorted(chosen), np.int32))
        self.indexed |= chosen

    @precondition(lambda self: self.indexed)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        chosen = data.draw(st.sets(st.sampled_from(sorted(self.indexed))), "cells")
        self.table.forget(np.array(sorted(chosen), np.int32))
        self.indexed -= chosen

    @precondition(lambda self: self.indexed)
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        known = sorted(self.indexed | self.owned)
        chosen = data.draw(st.lists(st.sampled_from(known), unique=True), "cells")
        sequence = self.table.open()
        self.table.adopt(sequence, np.array(chosen, np.int32))
        self.note_open(sequence, chosen)

    @invariant()
    def the_table_says_what_the_model_says(self) -> None:
        self.table.check()
        assert self.table.free == len(self.free)
        assert self.table.owned == len(self.owned)
        assert self.table.cached == len(self.indexed - self.owned)
        assert self.table.used_end == max(self.owned | self.indexed, default=-1) + 1
        for sequence, own in self.lists.items():
            assert self.table.cells(sequence).tolist() == own
            assert self.table.position(sequence) == len(own)


TestCellMachine = CellMachine.TestCase
TestCellMachine.settings = settings(UNHURRIED, max_examples=40, stateful_step_count=40)


class PrefixModel:
    """The model: every known prefix, as a whole, and the cell of its last token."""

    def __init__(self) -> None:
        self.cell_of: dict[tuple[int, ...], int] = {}

    def match(self, tokens: tuple[int, ...]) -> list[int]:
        cells = []
        for end in range(1, len(tokens)):
            if tokens[:end] not in self.cell_of:
                break
            cells.append(self.cell_of[tokens[:end]])
        return cells

    def insert(self, tokens: tuple[int, ...], cells: list[int]) -> None:
        for end, cell in enumerate(cells, start=1):
            self.cell_of.setdefault(tokens[:end], cell)


def test_the_prefix_index_knows_what_a_plain_dictionary_of_prefixes_knows() -> None:
    """4000 random uses, as the planner makes them: match, adopt, extend, insert, release, evict."""
    lot = random.Random(7)
    table = CellTable(40)
    index, model = PrefixIndex(table), PrefixModel()
    live: dict[int, tuple[int, ...]] = {}
    num_evicted = num_matched = num_forgotten = 0
    for _ in range(4000):
        if lot.random() < 0.5:
            tokens = tuple(lot.choices(range(2), k=lot.randint(1, 9)))
            matched = index.match(np.array(tokens, np.int64))
            assert matched.tolist() == model.match(tokens)
            num_matched += len(matched)
            sequence = table.open()
            table.adopt(sequence, matched)
            wanted = len(tokens) - len(matched)
            before = table.cached
            if table.free < wanted:
                freed = index.evict(wanted - table.free)
                assert freed == min(wanted - table.free + freed, before)
                num_evicted += freed
            num_forgotten += reconcile(model, table, index)
            if table.extend({sequence: wanted}):
                live[sequence] = tokens
            else:
                table.release(sequence)
        elif live:
            sequence = lot.choice(sorted(live))
            tokens = live[sequence]
            if lot.random() < 0.7:
                index.insert(np.array(tokens, np.int64), table.cells(sequence))
                model.insert(tokens, table.cells(sequence).tolist())
            if lot.random() < 0.7:
                table.release(sequence)
                del live[sequence]
        table.check()
        index.check()
    assert min(num_evicted, num_matched, num_forgotten) > 300


def reconcile(model: PrefixModel, table: CellTable, index: PrefixIndex) -> int:
    """Let the model forget what eviction took: whole ends of prefixes, never what has something known behind it."""
    gone = [prefix for prefix in model.cell_of if index.match(np.array([*prefix, -1], np.int64)).size < len(prefix)]
    for prefix in gone:
        del model.cell_of[prefix]
    assert all(prefix[:-1] in model.cell_of for prefix in model.cell_of if len(prefix) > 1)
    return len(gone)

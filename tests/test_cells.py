"""The cell table, with the values of semantics section 11 (statements 18-22, 26-33).

Where the reference speaks of owner bits and masks, ours has reference counts and lists of cells: what a query may see
is exactly its sequence's list up to its own position. Our sequence ids are never used twice, at most as many as fit
into the pool.
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.cells import CellTable
from planner.growable import Growable


def counts(table: CellTable) -> tuple[int, int, int]:
    table.check()
    return table.free, table.owned, table.cached


def cells(table: CellTable, sequence: int) -> list[int]:
    return [int(cell) for cell in table.cells(sequence)]


def opened(table: CellTable, *lengths: int) -> list[int]:
    """Sequences of these lengths, placed in one go."""
    sequences = [table.open() for _ in lengths]
    assert table.extend(dict(zip(sequences, lengths, strict=True)))
    return sequences


def test_a_batched_prefill_keeps_sequences_apart() -> None:
    table = CellTable(16)
    a, b = opened(table, 3, 2)
    assert cells(table, a) == [0, 1, 2]
    assert cells(table, b) == [3, 4]
    assert table.used_end == 5
    assert counts(table) == (11, 5, 0)


def test_decode_and_prefill_share_one_step() -> None:
    table = CellTable(16)
    (a,) = opened(table, 2)
    b = table.open()
    assert table.extend({a: 1, b: 2})
    assert cells(table, a) == [0, 1, 2]
    assert cells(table, b) == [3, 4]


def test_cells_are_given_out_in_the_order_of_the_step() -> None:
    table = CellTable(16)
    a, b = opened(table, 3, 2)
    assert table.extend({b: 1, a: 1})
    assert cells(table, b) == [3, 4, 5]
    assert cells(table, a) == [0, 1, 2, 6]
    assert (table.position(a), table.position(b), table.used_end) == (4, 3, 7)


def test_a_fork_takes_no_cell_and_the_last_owner_frees_them() -> None:
    table = CellTable(16)
    (a,) = opened(table, 4)
    twin = table.fork(a)
    assert counts(table) == (12, 4, 0)
    assert cells(table, twin) == cells(table, a)
    table.release(a)
    assert counts(table) == (12, 4, 0)
    table.release(twin)
    assert counts(table) == (16, 0, 0)
    assert table.used_end == 0


def test_a_fork_can_share_a_part_and_diverges_into_cells_of_its_own() -> None:
    table = CellTable(16)
    (a,) = opened(table, 4)
    twin = table.fork(a, 2)
    assert table.position(twin) == 2
    assert table.extend({twin: 1, a: 1})
    assert cells(table, twin) == [0, 1, 4]
    assert cells(table, a) == [0, 1, 2, 3, 5]
    assert table.position(table.fork(a, 0)) == 0


@pytest.mark.parametrize("upto", [-1, 5])
def test_a_fork_beyond_its_parent_is_refused_and_changes_nothing(upto: int) -> None:
    table = CellTable(16)
    (a,) = opened(table, 4)
    with pytest.raises(ValueError, match=f"cannot fork sequence 1 of 4 positions at {upto}"):
        table.fork(a, upto)
    assert counts(table) == (12, 4, 0)
    assert table.open() == 2


def test_too_few_free_cells_refuse_all_sequences_and_change_nothing() -> None:
    table = CellTable(4)
    a, b = table.open(), table.open()
    assert not table.extend({a: 3, b: 2})
    assert counts(table) == (4, 0, 0)
    assert (table.position(a), table.position(b), table.used_end) == (0, 0, 0)
    assert table.extend({a: 3, b: 1})
    assert not table.extend({a: 1})
    assert counts(table) == (0, 4, 0)


def test_extending_by_nothing_is_no_change() -> None:
    table = CellTable(4)
    (a,) = opened(table, 2)
    assert table.extend({})
    assert table.extend({a: 0})
    assert counts(table) == (2, 2, 0)


def test_a_negative_extension_is_a_mistake() -> None:
    table = CellTable(4)
    a, b = opened(table, 1, 1)
    with pytest.raises(ValueError, match="negative"):
        table.extend({a: 1, b: -1})
    assert counts(table) == (2, 2, 0)


def test_a_rewound_sequence_refills_the_cells_it_let_go() -> None:
    table = CellTable(16)
    (a,) = opened(table, 4)
    table.rewind(a, 2)
    assert (table.position(a), table.used_end) == (2, 2)
    assert table.extend({a: 2})
    assert cells(table, a) == [0, 1, 2, 3]


def test_holes_are_refilled_before_the_extent_grows() -> None:
    table = CellTable(16)
    a, b = opened(table, 4, 2)
    table.release(a)
    assert table.used_end == 6
    (c,) = opened(table, 2)
    assert cells(table, c) == [0, 1]
    assert table.used_end == 6
    assert table.extend({b: 3})
    assert cells(table, b) == [4, 5, 2, 3, 6]


def test_freeing_the_tail_shrinks_the_used_end_over_older_holes() -> None:
    table = CellTable(16)
    a, b, c = opened(table, 2, 2, 2)
    table.release(b)
    assert table.used_end == 6
    table.release(c)
    assert table.used_end == 2
    table.release(a)
    assert table.used_end == 0


def test_a_sequence_rewound_to_zero_is_still_open() -> None:
    table = CellTable(16)
    (a,) = opened(table, 3)
    table.rewind(a, 0)
    assert table.position(a) == 0
    assert table.extend({a: 1})


@pytest.mark.parametrize("position", [-1, 4])
def test_rewinding_past_the_end_is_refused(position: int) -> None:
    table = CellTable(16)
    (a,) = opened(table, 3)
    with pytest.raises(ValueError, match=f"cannot rewind sequence 1 of 3 positions to {position}"):
        table.rewind(a, position)
    assert table.position(a) == 3


def test_rewinding_one_owner_leaves_the_others_their_cells() -> None:
    table = CellTable(16)
    (a,) = opened(table, 4)
    twin = table.fork(a)
    table.rewind(a, 1)
    assert counts(table) == (12, 4, 0)
    assert cells(table, twin) == [0, 1, 2, 3]
    assert table.extend({a: 1})
    assert cells(table, a) == [0, 4]


def test_ids_ascend_and_are_never_used_twice() -> None:
    table = CellTable(2)
    assert [table.open() for _ in range(100)] == list(range(1, 101))
    table.release(100)
    table.release(7)
    assert table.open() == 101
    with pytest.raises(KeyError):
        table.extend({7: 1})
    with pytest.raises(KeyError):
        table.release(7)


def test_an_unknown_id_refuses_the_whole_step() -> None:
    table = CellTable(4)
    a = table.open()
    with pytest.raises(KeyError):
        table.extend({a: 1, 40: 1})
    assert counts(table) == (4, 0, 0)
    for verb in (table.position, table.cells, table.fork):
        with pytest.raises(KeyError):
            verb(40)


def test_what_the_prefix_index_keeps_outlives_its_sequence() -> None:
    table = CellTable(8)
    (a,) = opened(table, 4)
    table.retain(table.cells(a)[:3])
    assert counts(table) == (4, 4, 0)
    table.release(a)
    assert counts(table) == (5, 0, 3)
    assert table.unowned(np.array([0, 3], np.int32)).tolist() == [True, True]
    b = table.open()
    table.adopt(b, np.array([0, 1], np.int32))
    assert counts(table) == (5, 2, 1)
    assert table.extend({b: 1})
    assert cells(table, b) == [0, 1, 3]
    table.forget(np.array([0, 1, 2], np.int32))
    assert counts(table) == (5, 3, 0)
    table.release(b)
    assert counts(table) == (8, 0, 0)


def test_only_a_sequence_without_cells_adopts() -> None:
    table = CellTable(8)
    a, b = opened(table, 2, 1)
    with pytest.raises(ValueError, match=f"sequence {b} already has 1 cells"):
        table.adopt(b, table.cells(a))
    assert counts(table) == (5, 3, 0)


def test_a_free_cell_cannot_be_adopted() -> None:
    table = CellTable(8)
    a = table.open()
    with pytest.raises(ValueError, match="a free cell cannot be adopted"):
        table.adopt(a, np.array([0], np.int32))
    assert counts(table) == (8, 0, 0)


def test_views_are_read_only_and_keep_what_they_showed() -> None:
    table = CellTable(100)
    (a,) = opened(table, 3)
    view = table.cells(a)
    assert view.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 9
    assert table.extend({a: 90})
    assert view.tolist() == [0, 1, 2]
    assert cells(table, a) == list(range(93))


def test_the_check_finds_a_miscount() -> None:
    table = CellTable(4)
    opened(table, 2)
    table.check()
    table._num_owners[3] = 1
    with pytest.raises(AssertionError, match="reference counts"):
        table.check()


def test_an_array_grows_by_one_and_by_many() -> None:
    array = Growable(np.array([1, 2], np.int64))
    for value in range(3, 40):
        array.append(value)
    array.extend(np.arange(40, 200))
    assert len(array) == 199
    assert array.view().tolist() == list(range(1, 200))
    assert array.view(2, 5).tolist() == [3, 4, 5]
    assert array.view(197, 300).tolist() == [198, 199]
    array.truncate(1)
    assert array.view().tolist() == [1]

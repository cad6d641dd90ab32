"""How a step's packed axis is cut into forwards, and which rows are selected (semantics 3.1, 3.2; statements 1-8)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import Method, SelectedRows, Slice, decode_width, pad_selector, plan_slices, select_rows
from planner.errors import InvalidConfiguration, SetupError
from tests.strategies import UNHURRIED


def plan(total: int, widest: int, narrowest: int, widths: tuple[int, ...] = (1,)) -> str:
    """A plan in short: P[0:8) for a prefill, D8 for a one-token decode, D[0:4) for a wider one."""
    words = []
    for piece in plan_slices(total, widest, narrowest, widths):
        letter = "P" if piece.method is Method.PREFILL else "D"
        one = piece.method is Method.DECODE and piece.length == 1
        end = piece.offset + piece.length
        words.append(f"D{piece.offset}" if one else f"{letter}[{piece.offset}:{end})")
    return " ".join(words)


@pytest.mark.parametrize(
    ("total", "widest", "narrowest", "expected"),
    [
        (1, 8, 2, "D0"),
        (2, 8, 2, "P[0:2)"),
        (8, 8, 2, "P[0:8)"),
        (9, 8, 2, "P[0:8) D8"),
        (10, 8, 2, "P[0:8) P[8:10)"),
        (16, 8, 2, "P[0:8) P[8:16)"),
        (4, 8, 5, "D0 D1 D2 D3"),
        (5, 8, 5, "P[0:5)"),
        (11, 8, 5, "P[0:8) D8 D9 D10"),
        (0, 8, 2, ""),
    ],
)
def test_the_ten_rows_of_the_reference_table(total: int, widest: int, narrowest: int, expected: str) -> None:
    assert plan(total, widest, narrowest) == expected


@pytest.mark.parametrize(
    ("total", "widest", "narrowest", "expected"),
    [
        (3, 8, 2, "P[0:3)"),
        (17, 8, 2, "P[0:8) P[8:16) D16"),
        (20, 8, 2, "P[0:8) P[8:16) P[16:20)"),
        (1, 8, 5, "D0"),
        (8, 8, 5, "P[0:8)"),
        (12, 8, 5, "P[0:8) D8 D9 D10 D11"),
        (13, 8, 5, "P[0:8) P[8:13)"),
        (3, 1, 2, "D0 D1 D2"),
        (7, 8, 8, "D0 D1 D2 D3 D4 D5 D6"),
        (8, 8, 8, "P[0:8)"),
        (15, 8, 8, "P[0:8) D8 D9 D10 D11 D12 D13 D14"),
        (3, 8, 1, "P[0:3)"),
        (1, 8, 1, "D0"),
        (1, 8, 0, "D0"),
        (4, 8, 9, "D0 D1 D2 D3"),
        (-3, 8, 2, ""),
        (30, 16, 5, "P[0:16) P[16:30)"),
        (35, 16, 5, "P[0:16) P[16:32) D32 D33 D34"),
        (513, 512, 5, "P[0:512) D512"),
        (516, 512, 5, "P[0:512) D512 D513 D514 D515"),
        (517, 512, 5, "P[0:512) P[512:517)"),
    ],
)
def test_the_further_values_of_the_rule(total: int, widest: int, narrowest: int, expected: str) -> None:
    assert plan(total, widest, narrowest) == expected


@pytest.mark.parametrize("widest", [0, -1])
def test_a_program_without_width_is_refused_instead_of_looping_for_ever(widest: int) -> None:
    with pytest.raises(InvalidConfiguration, match=f"max_prefill_tokens must be positive, not {widest}") as refusal:
        plan_slices(1, widest)
    assert refusal.value.param == "max_prefill_tokens"
    assert isinstance(refusal.value, SetupError)


@pytest.mark.parametrize(
    ("total", "widest", "narrowest", "widths", "expected"),
    [
        (1, 8, 5, (1, 2, 4), "D0"),
        (3, 8, 5, (1, 2, 4), "D[0:3)"),
        (4, 8, 2, (1, 2, 4), "D[0:4)"),
        (5, 8, 5, (1, 2, 4), "P[0:5)"),
        (5, 8, 7, (1, 2, 4), "D[0:4) D4"),
        (13, 8, 2, (1, 2, 4), "P[0:8) P[8:13)"),
        (11, 8, 2, (1, 2, 4), "P[0:8) D[8:11)"),
        (20, 8, 2, (1, 2, 4, 8, 16), "D[0:8) D[8:16) D[16:20)"),
    ],
)
def test_a_ladder_lets_lone_decodes_share_a_forward(
    total: int, widest: int, narrowest: int, widths: tuple[int, ...], expected: str
) -> None:
    assert plan(total, widest, narrowest, widths) == expected


@UNHURRIED
@given(
    total=st.integers(-5, 400),
    widest=st.integers(1, 64),
    narrowest=st.integers(0, 70),
    widths=st.sets(st.integers(2, 80)).map(lambda wider: (1, *sorted(wider))),
)
def test_slices_cover_the_axis_in_order_and_within_the_program(
    total: int, widest: int, narrowest: int, widths: tuple[int, ...]
) -> None:
    at = 0
    for piece in plan_slices(total, widest, narrowest, widths):
        assert piece.offset == at
        at += piece.length
        if piece.method is Method.PREFILL:
            assert max(narrowest, 2) <= piece.length <= widest
        else:
            assert 1 <= piece.length <= min(widths[-1], widest)
    assert at == max(0, total)


@UNHURRIED
@given(total=st.integers(0, 400), widest=st.integers(1, 64), narrowest=st.integers(0, 70))
def test_without_a_ladder_a_decode_is_one_token(total: int, widest: int, narrowest: int) -> None:
    slices = plan_slices(total, widest, narrowest)
    assert all(piece.length == 1 for piece in slices if piece.method is Method.DECODE)


def test_the_narrowest_prefill_is_two_tokens_by_default() -> None:
    assert plan_slices(2, 8) == [Slice(0, 2, Method.PREFILL)]
    assert plan_slices(1, 8) == [Slice(0, 1, Method.DECODE)]


@pytest.mark.parametrize(("length", "width"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 16), (16, 16)])
def test_a_decode_is_padded_to_the_smallest_width_that_holds_it(length: int, width: int) -> None:
    assert decode_width(length, (1, 2, 4, 16)) == width


def test_no_width_holds_more_than_the_widest() -> None:
    with pytest.raises(ValueError, match=r"no decode width of \(1, 2\) holds 3 tokens"):
        decode_width(3, (1, 2))


@pytest.mark.parametrize(
    ("offset", "length", "selector", "chunks"),
    [
        (0, 6, (2, 5), (0, 2)),
        (6, 4, (3,), (3,)),
        (10, 3, (2,), ()),
    ],
)
def test_rows_are_selected_relative_to_the_slice(
    offset: int, length: int, selector: tuple[int, ...], chunks: tuple[int, ...]
) -> None:
    assert select_rows([2, None, 5, 9], offset, length) == SelectedRows(selector, chunks)


@UNHURRIED
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12),
    widest=st.integers(1, 10),
    narrowest=st.integers(2, 10),
)
def test_each_wanted_row_is_selected_in_exactly_one_slice(
    lengths: list[tuple[int, bool]], widest: int, narrowest: int
) -> None:
    indices: list[int | None] = []
    total = 0
    for length, wanted in lengths:
        total += length
        indices.append(total - 1 if wanted else None)
    found: list[tuple[int, int]] = []
    for piece in plan_slices(total, widest, narrowest):
        rows = select_rows(indices, piece.offset, piece.length)
        assert rows.selector
        found += [
            (chunk, piece.offset + row)
            for chunk, row in zip(rows.chunks, rows.selector[: len(rows.chunks)], strict=True)
        ]
    assert found == [(chunk, index) for chunk, index in enumerate(indices) if index is not None]


@pytest.mark.parametrize(
    ("selector", "min_rows", "padded"),
    [
        ((2, 5), 5, (2, 5, 5, 5, 5)),
        ((0,), 1, (0,)),
        ((7,), 5, (7, 7, 7, 7, 7)),
        ((0, 1, 2, 3, 4, 5), 5, (0, 1, 2, 3, 4, 5)),
    ],
)
def test_a_selector_is_padded_with_its_last_row_and_never_cut(
    selector: tuple[int, ...], min_rows: int, padded: tuple[int, ...]
) -> None:
    assert pad_selector(selector, min_rows) == padded


def test_a_prefill_that_wants_nothing_selects_its_last_row_for_nobody() -> None:
    rows = select_rows([None, 20], 0, 8)
    assert pad_selector(rows.selector, 5) == (7, 7, 7, 7, 7)
    assert rows.chunks == ()

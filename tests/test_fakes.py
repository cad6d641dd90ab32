"""The fake executor can fail: a step that breaks a promise of the seam is caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.request import SamplingParams
from planner.slices import Method, Slice
from planner.step import Chunk, Step
from tests.fake_pool import WrongStepError
from tests.fakes import FakeExecutor, expected_tokens, fake_info, fake_request

GREEDY = SamplingParams(temperature=0.0)


def chunk(sequence_id: int, start: int, tokens: list[int] | None, cells: list[int]) -> Chunk:
    return Chunk(
        sequence_id=sequence_id,
        start=start,
        length=len(cells) - start,
        cells=np.array(cells, dtype=np.int32),
        tokens=None if tokens is None else np.array(tokens, dtype=np.int64),
        samples=True,
        sampling=GREEDY,
    )


def prefill(*chunks: Chunk) -> Step:
    return Step(0, chunks, (Slice(0, sum(c.length for c in chunks), Method.PREFILL),))


def decode(*chunks: Chunk) -> Step:
    return Step(0, chunks, (Slice(0, len(chunks), Method.DECODE),))


@pytest.fixture
def executor() -> FakeExecutor:
    """Two sequences of three tokens are in its pool: 1 in cells 0..2, 2 in cells 3..5."""
    executor = FakeExecutor()
    executor.launch(prefill(chunk(1, 0, [1, 2, 3], [0, 1, 2]), chunk(2, 0, [4, 5, 6], [3, 4, 5])))
    executor.collect()
    return executor


def test_tokens_are_the_expected_ones(executor: FakeExecutor) -> None:
    request = fake_request([1, 2, 3], 2, sampling=GREEDY)
    first, second = expected_tokens(request)
    executor.launch(decode(chunk(1, 3, [first], [0, 1, 2, 6])))
    (outcome,) = executor.collect().outcomes
    assert getattr(outcome, "token", None) == second


def test_a_token_that_never_visited_the_host_is_the_last_one_drawn(executor: FakeExecutor) -> None:
    executor.launch(decode(chunk(1, 3, None, [0, 1, 2, 6])))
    (outcome,) = executor.collect().outcomes
    assert getattr(outcome, "token", None) == expected_tokens(fake_request([1, 2, 3], 2, sampling=GREEDY))[1]


@pytest.mark.parametrize(
    "cells",
    [[1, 0, 2, 6], [3, 1, 2, 6], [0, 1, 5, 6], [0, 1, 7, 6]],
    ids=["two cells swapped", "first of another", "last of another", "never written"],
)
def test_a_wrong_cell_list_is_caught(executor: FakeExecutor, cells: list[int]) -> None:
    with pytest.raises(WrongStepError):
        executor.launch(decode(chunk(1, 3, [9], cells)))


def test_two_rows_for_one_cell_are_caught(executor: FakeExecutor) -> None:
    with pytest.raises(WrongStepError, match="same cell"):
        executor.launch(decode(chunk(1, 3, [9], [0, 1, 2, 6]), chunk(2, 3, [9], [3, 4, 5, 6])))


def test_a_sequence_twice_in_a_step_is_caught(executor: FakeExecutor) -> None:
    with pytest.raises(WrongStepError, match="two chunks"):
        executor.launch(decode(chunk(1, 3, [9], [0, 1, 2, 6]), chunk(1, 3, [9], [0, 1, 2, 7])))


@pytest.mark.parametrize(
    "slices",
    [
        (),
        (Slice(0, 1, Method.DECODE),),
        (Slice(0, 1, Method.DECODE), Slice(0, 1, Method.DECODE)),
        (Slice(0, 3, Method.PREFILL),),
        (Slice(0, 2, Method.PREFILL), Slice(2, 2, Method.PREFILL)),
    ],
)
def test_slices_that_do_not_tile_the_packed_axis_are_caught(executor: FakeExecutor, slices: tuple[Slice, ...]) -> None:
    step = decode(chunk(1, 3, [9], [0, 1, 2, 6]), chunk(2, 3, [9], [3, 4, 5, 7]))
    with pytest.raises(WrongStepError, match=r"slice|length"):
        executor.launch(replace(step, slices=slices))


def test_a_slice_wider_than_the_program_is_caught() -> None:
    executor = FakeExecutor(fake_info(max_prefill_tokens=4, widths=(1,)))
    with pytest.raises(WrongStepError, match=r"\[2, 4\]"):
        executor.launch(prefill(chunk(1, 0, [1, 2, 3, 4, 5], [0, 1, 2, 3, 4])))
    step = decode(chunk(1, 0, [1], [0]), chunk(2, 0, [1], [1]))
    with pytest.raises(WrongStepError, match=r"\[1, 1\]"):
        executor.launch(step)


def test_cells_of_a_failed_forward_hold_nothing(executor: FakeExecutor) -> None:
    executor.fail_forward(1)
    executor.launch(decode(chunk(1, 3, [9], [0, 1, 2, 6])))
    with pytest.raises(WrongStepError, match="in flight"):
        executor.launch(decode(chunk(2, 3, [9], [3, 4, 5, 7])))
    executor.collect()
    with pytest.raises(WrongStepError):
        executor.launch(decode(chunk(1, 4, [9], [0, 1, 2, 6, 7])))

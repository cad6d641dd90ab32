"""Captured prefills read what an eager one would, at fixed addresses, and padding that nobody sees. No GPU: forwards
here only look at what they are given."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.attention import Span
from worker.cuda.graphs import Capture, Forward
from worker.cuda.prefill_graphs import PrefillGraphs
from worker.cuda.prefill_plan import PrefillPlan, plan_prefill
from worker.kv_pool import KvPool

CPU = torch.device("cpu")
SCRATCH = 777


class Looking:
    """Gives row r of its result the token at `rows[r]`, and keeps what it was called with."""

    def __init__(self) -> None:
        self.tokens, self.plan = torch.empty(0), plan_prefill([Span(0, 0, 1, np.zeros(1, np.int32))], 1, CPU)

    def hidden(self, tokens: torch.Tensor, plan: PrefillPlan, rows: torch.Tensor) -> torch.Tensor:
        self.tokens, self.plan = tokens, plan
        return tokens[rows].unsqueeze(1)


def graphs_over(
    prefill: Looking,
    widths: tuple[int, ...] = (16, 64),
    shared_heads: int = 2,
    capture: Capture = lambda forward: forward,
) -> PrefillGraphs:
    return PrefillGraphs(
        prefill, widths, max_rows=24, shared_heads=shared_heads, pool=KvPool(1, SCRATCH, 1, 1, torch.float32, CPU),
        capture=capture,
    )  # fmt: skip


def spans_of(sequences: list[tuple[int, int]]) -> list[Span]:
    """(start, length) of each chunk, in shuffled cells."""
    spans, row, free = [], 0, random.Random(1).sample(range(700), 700)
    for start, length in sequences:
        spans.append(Span(row, start, length, np.array([free.pop() for _ in range(start + length)], np.int32)))
        row += length
    return spans


def test_replay_reads_what_an_eager_forward_would_and_padding_goes_to_scratch() -> None:
    seen = Looking()
    graphs = graphs_over(seen)
    for sequences in ([(0, 20), (7, 1), (3, 12)], [(5, 1)], [(0, 64)]):  # what was there before must not show
        spans = spans_of(sequences)
        num_tokens = sum(length for _, length in sequences)
        tokens = np.arange(100, 100 + num_tokens)
        assert graphs.takes(spans, 1)
        placed = graphs.place(spans, tokens, [num_tokens - 1])
        placed[0] = 5
        assert graphs.hidden().tolist() == [[5 if num_tokens == 1 else 99 + num_tokens]]
        wanted, plan = plan_prefill(spans, 2, CPU), seen.plan
        assert seen.tokens.tolist()[:num_tokens] == [5, *tokens[1:].tolist()]
        for name in ("chunks", "cells", "positions", "new_cells", "wide_tiles", "long_tiles", "short_tiles"):
            here, there = getattr(plan, name), getattr(wanted, name)
            assert here[: len(there)].tolist() == there.tolist(), name
        assert set(plan.new_cells[num_tokens:].tolist()) <= {SCRATCH}
        for name in ("wide_tiles", "long_tiles", "short_tiles"):
            assert set(getattr(plan, name)[len(getattr(wanted, name)) :, 0].tolist()) <= {-1}, name


@pytest.mark.parametrize(("tokens", "rows", "width"), [(3, 1, 16), (16, 16, 16), (17, 2, 64), (2, 20, 64)])
def test_the_narrowest_width_that_holds_tokens_and_rows_runs(tokens: int, rows: int, width: int) -> None:
    seen = Looking()
    graphs = graphs_over(seen)
    graphs.place(spans_of([(0, tokens)]), np.zeros(tokens, np.int64), [0] * rows)
    assert len(graphs.hidden()) == rows
    assert len(seen.tokens) == seen.plan.num_tokens == width


def test_a_pool_that_moved_is_captured_with_rows_that_every_width_has() -> None:
    """A capture runs the forward once, narrow ones too, and the last replay may have left any rows behind."""

    def capture(forward: Forward) -> Forward:
        forward()
        return forward

    graphs = graphs_over(Looking(), capture=capture)
    graphs.place(spans_of([(0, 60)]), np.arange(60), [59])
    graphs.hidden()
    graphs.rebind()
    graphs.place(spans_of([(0, 20), (0, 10)]), np.arange(30), [19, 29])
    assert graphs.hidden().tolist() == [[19], [29]]


def test_more_tokens_rows_or_cells_than_there_is_room_for_are_not_taken() -> None:
    graphs = graphs_over(Looking())
    assert not graphs.takes(spans_of([(0, 65)]), 1)
    assert not graphs.takes(spans_of([(0, 30)]), 25)
    assert not graphs.takes([Span(0, 2**18, 1, np.zeros(1, np.int32))], 1)


@given(
    st.sampled_from([1, 2, 3, 4, 7, 16]),
    st.lists(st.sampled_from([1, 2, 5, 8, 9, 17, 31, 64, 65, 100, 128, 129, 200, 256, 300]), min_size=1),
)
@settings(deadline=None, max_examples=60)
def test_there_is_room_for_the_tiles_of_any_chunks(shared_heads: int, lengths: list[int]) -> None:
    width = 512
    kept: list[int] = []
    for length in lengths:
        if sum(kept) + length <= width:
            kept.append(length)
    spans, row = [], 0
    for length in kept:
        spans.append(Span(row, 0, length, np.arange(row, row + length, dtype=np.int32)))
        row += length
    seen = Looking()
    graphs = graphs_over(seen, (width,), shared_heads)
    graphs.place(spans, np.zeros(sum(kept), np.int64), [0])
    graphs.hidden()
    wanted = plan_prefill(spans, shared_heads, CPU)
    for name in ("wide_tiles", "long_tiles", "short_tiles"):
        assert getattr(seen.plan, name)[: len(getattr(wanted, name))].tolist() == getattr(wanted, name).tolist()

"""Attention of lone tokens over shuffled cells, in parts and whole, against float64; and the plan that it reads.

Runs on a GPU, or without one in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_lone_attention.py
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from worker.attention import Span
from worker.cuda.lone_attention import num_splits
from worker.cuda.lone_plan import layout_of, pack_lone, table_size, unpack_lone, write_lone
from worker.cuda.packed_attention import plan_for_gpu, update_and_attend_on_gpu
from worker.packed_plan import PackedPlan

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
# The interpreter multiplies bfloat16 matrices wrongly.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
MOST_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
POSITIONS = (0, 1, 15, 64, 200, 63, 129)


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Case:
    """Tokens at `positions`, each with a past of its own in shuffled cells; all other cells are NaN."""

    def __init__(self, positions: tuple[int, ...], shape: Shape, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        num_cells = sum(positions) + len(positions) + 17
        # Cell 0 stays NaN: a kernel that reads it in place of nothing shows.
        order = (1 + np.random.default_rng(0).permutation(num_cells - 1)).astype(np.int32)
        heads, size = (shape.num_kv_heads, shape.head_dim), num_cells + 1
        self.keys, self.values = (torch.full((size, *heads), torch.nan, dtype=dtype, device=DEVICE) for _ in "kv")
        self.spans, self.pasts, taken = [], [], 0
        for row, position in enumerate(positions):
            cells = order[taken : taken + position + 1]
            past = torch.randn(2, position, *heads, device=DEVICE).to(dtype)
            self.keys[cells[:-1]], self.values[cells[:-1]] = past
            self.spans.append(Span(row, position, 1, cells))
            self.pasts.append(past)
            taken += position + 1
        rows = len(positions)
        # Query, key and value lie side by side, as a projection leaves them.
        wide = torch.randn(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim, device=DEVICE).to(dtype)
        self.query, self.key, self.value = wide.split([shape.num_heads, *[shape.num_kv_heads] * 2], dim=1)

    def attended(self, packed: PackedPlan, window: int | None) -> Tensor:
        return update_and_attend_on_gpu(self.query, self.key, self.value, self.keys, self.values, packed, window)

    def expected(self, window: int | None) -> Tensor:
        """In float64, one token after the other."""
        return torch.stack([self._alone(row, window) for row in range(len(self.spans))])

    def _alone(self, row: int, window: int | None) -> Tensor:
        past_keys, past_values = self.pasts[row]
        keys, values = (
            torch.cat((past_keys, self.key[row : row + 1])),
            torch.cat((past_values, self.value[row : row + 1])),
        )
        first = 0 if window is None else max(0, len(keys) - window)
        shared = self.query.shape[1] // self.key.shape[1]
        k, v = (side[first:].double().repeat_interleave(shared, 1) for side in (keys, values))
        scores = torch.einsum("hd,chd->hc", self.query[row].double(), k) / self.query.shape[-1] ** 0.5
        return torch.einsum("hc,chd->hd", torch.softmax(scores, dim=-1), v)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("window", [None, 1, 20, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_token_sees_the_cells_of_its_own_sequence_only(dtype: torch.dtype, window: int | None) -> None:
    case = Case(POSITIONS, Shape(4, 2, 64), dtype)
    assert num_splits(len(POSITIONS), 2) > 4, "no context of this test is cut"
    attended = case.attended(plan_for_gpu(case.spans, 2, DEVICE), window)
    assert error(attended, case.expected(window)) < MOST_ERROR[dtype]


@pytest.mark.parametrize("shape", [Shape(4, 4, 64), Shape(7, 1, 80), Shape(6, 2, 96), Shape(3, 3, 8)], ids=str)
def test_every_layout_of_heads_is_attended(shape: Shape) -> None:
    case = Case((0, 70, 130), shape, torch.float16)
    assert error(case.attended(pack_lone(case.spans, DEVICE), None), case.expected(None)) < MOST_ERROR[torch.float16]


def test_a_context_that_is_not_cut_is_attended_alike() -> None:
    """So many tokens that each has a program of its own."""
    positions = (*POSITIONS, *[2] * 130)
    case = Case(positions, Shape(4, 4, 16), torch.float32)
    assert num_splits(len(positions), 4) == 1
    assert error(case.attended(pack_lone(case.spans, DEVICE), None), case.expected(None)) < 2e-6


def test_new_keys_and_values_reach_their_cells_and_no_other_changes() -> None:
    case = Case(POSITIONS, Shape(4, 2, 64), torch.float16)
    before = case.keys.clone(), case.values.clone()
    case.attended(pack_lone(case.spans, DEVICE), None)
    new = torch.tensor([int(span.cells[-1]) for span in case.spans], device=DEVICE)
    for side, old, written in ((case.keys, before[0], case.key), (case.values, before[1], case.value)):
        assert torch.equal(side[new], written)
        side[new] = old[new]
        assert torch.equal(side.nan_to_num(nan=9.0), old.nan_to_num(nan=9.0))


def test_a_table_of_fixed_size_says_the_same_whatever_lies_behind_its_cells() -> None:
    case = Case(POSITIONS, Shape(4, 2, 64), torch.float16)
    width, capacity = len(POSITIONS), 5000
    host = np.full(table_size(width, capacity), -(2**31), dtype=np.int32)
    used = write_lone(host, case.spans, width)
    assert used == len(host) - capacity + sum(POSITIONS) + width
    fixed = PackedPlan(torch.from_numpy(host).to(DEVICE), layout_of(width, capacity))
    assert torch.equal(case.attended(fixed, None), case.attended(pack_lone(case.spans, DEVICE), None))


def test_the_plan_says_where_each_sequence_lies() -> None:
    spans = [Span(0, 2, 1, np.array([7, 5, 3], np.int32)), Span(1, 0, 1, np.array([9], np.int32))]
    plan = unpack_lone(pack_lone(spans, DEVICE))
    assert plan.positions.tolist() == [2, 0]
    assert plan.firsts.tolist() == [0, 3]
    assert plan.new_cells.tolist() == [3, 9]
    assert plan.cells.tolist() == [7, 5, 3, 9]


def test_a_reference_that_sees_one_token_too_many_is_found_out() -> None:
    case = Case(POSITIONS, Shape(4, 2, 64), torch.float32)
    assert error(case.attended(pack_lone(case.spans, DEVICE), 20), case.expected(21)) > 1e-2


@pytest.mark.skipif(INTERPRETED, reason="nothing is captured in the interpreter")
def test_a_captured_launch_follows_what_its_table_holds() -> None:
    long, short = (Case(positions, Shape(8, 2, 128), torch.bfloat16) for positions in ((900, 0, 300), (5, 700, 64)))
    capacity, width = 4000, 3
    table = torch.zeros(table_size(width, capacity), dtype=torch.int32, device=DEVICE)
    fixed = PackedPlan(table, layout_of(width, capacity))

    def fill(case: Case) -> None:
        host = np.zeros(len(table), dtype=np.int32)
        write_lone(host, case.spans, width)
        table.copy_(torch.from_numpy(host))

    fill(long)
    eager = long.attended(fixed, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = long.attended(fixed, None)
    graph.replay()
    assert torch.equal(captured, eager)
    fill(short)
    for name in ("keys", "values"):
        room = getattr(long, name)
        room[: len(getattr(short, name))] = getattr(short, name)[: len(room)]
    long.query.copy_(short.query)
    long.key.copy_(short.key)
    long.value.copy_(short.value)
    graph.replay()
    assert torch.equal(captured, short.attended(fixed, None))

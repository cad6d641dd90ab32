"""Attention over cells equals a dense softmax over each sequence alone; and the comparison notices a wrong cell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from worker.attention import Span, TorchAttention
from worker.attention_op import OperatorAttention, attention_of, distinct_windows, plan_attention
from worker.cpu.plan import unpack
from worker.kv_pool import KvPool
from worker.models.decoder import Attention

NUM_CELLS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 400, 4, 2, 16
WINDOWS = (None, 5)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def operator(scene: Scene, spans: Sequence[Span] | None = None, windows: Sequence[int | None] = WINDOWS) -> Attention:
    return attention_of(scene.pool, scene.spans if spans is None else spans, windows, NUM_HEADS)


class Scene:
    """Sequences with a past in scattered cells, and one forward's query, key and value for their next tokens."""

    def __init__(self, shapes: Sequence[tuple[int, int]], seed: int) -> None:
        """`shapes`: (past, length) of each sequence."""
        random = np.random.default_rng(seed)
        torch.manual_seed(seed)
        free = random.permutation(NUM_CELLS).astype(np.int32)
        self.pool = KvPool(len(WINDOWS), NUM_CELLS, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
        self.pool.keys.fill_(torch.nan)  # a cell that nobody wrote must not be read
        self.pool.values.fill_(torch.nan)
        self.pool.keys[:, self.pool.scratch_cell] = 0
        self.pool.values[:, self.pool.scratch_cell] = 0
        self.spans: list[Span] = []
        row = used = 0
        for past, length in shapes:
            cells = free[used : used + past + length]
            self.pool.keys[:, cells[:past]] = torch.randn(len(WINDOWS), past, NUM_KV_HEADS, HEAD_DIM)
            self.pool.values[:, cells[:past]] = torch.randn(len(WINDOWS), past, NUM_KV_HEADS, HEAD_DIM)
            self.spans.append(Span(row, past, length, cells))
            row, used = row + length, used + past + length
        self.query = torch.randn(row, NUM_HEADS, HEAD_DIM)
        self.key, self.value = torch.randn(2, row, NUM_KV_HEADS, HEAD_DIM).unbind(0)

    def run(self, attention: Attention, layer: int) -> Tensor:
        return attention.attend(layer, self.query, self.key, self.value)

    def expected(self, layer: int) -> Tensor:
        """Row by row over the written pool, a dense softmax in float64."""
        window, rows = WINDOWS[layer], []
        for span in self.spans:
            keys = self.pool.keys[layer, span.cells].double()
            values = self.pool.values[layer, span.cells].double()
            for offset in range(span.length):
                end = span.start + offset + 1
                first = 0 if window is None else max(0, end - window)
                for head in range(NUM_HEADS):
                    seen = slice(first, end), head // (NUM_HEADS // NUM_KV_HEADS)
                    scores = keys[seen] @ self.query[span.row + offset, head].double() / HEAD_DIM**0.5
                    rows.append(scores.softmax(0) @ values[seen])
        return torch.stack(rows).view(-1, NUM_HEADS, HEAD_DIM).float()


shapes = st.lists(st.tuples(st.integers(0, 25), st.integers(1, 12)), min_size=1, max_size=9)


@settings(max_examples=30, deadline=None)
@given(shapes=shapes, seed=st.integers(0, 1000))
def test_both_ways_of_attending_equal_a_dense_softmax(shapes: list[tuple[int, int]], seed: int) -> None:
    scene = Scene(shapes, seed)
    for attention in (TorchAttention(scene.pool, scene.spans, WINDOWS), operator(scene)):
        for layer in range(len(WINDOWS)):
            result = scene.run(attention, layer)
            torch.testing.assert_close(result, scene.expected(layer), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 1), (5, 6)])
def test_two_swapped_cells_are_noticed(shape: tuple[int, int]) -> None:
    scene = Scene([shape, (4, 1)], 1)
    span = scene.spans[0]
    swapped = span.cells.copy()
    # Attention does not mind the order of cells, so one from beyond the window comes into it.
    swapped[[0, span.start - 2]] = swapped[[span.start - 2, 0]]
    sabotaged = [Span(span.row, span.start, span.length, swapped), scene.spans[1]]
    whole = scene.run(operator(scene, windows=(5, 5)), 0)
    wrong = scene.run(operator(scene, sabotaged, (5, 5)), 0)
    assert not torch.allclose(whole[: span.length], wrong[: span.length], atol=1e-3)
    assert torch.equal(whole[span.length :], wrong[span.length :])


def test_cost_does_not_grow_with_the_pool_or_with_the_longest_neighbour() -> None:
    scene = Scene([(100, 1), *[(3, 1)] * 20, (50, 8)], 2)
    attention = TorchAttention(scene.pool, scene.spans, (None,))
    gathered = sum(len(group.cells) for group in attention._groups[None])
    assert gathered <= 1.4 * (101 + 20 * 4 + 58)


def test_long_spans_are_cut_so_that_masks_stay_small() -> None:
    cells = np.arange(6000, dtype=np.int32)
    pool = KvPool(1, 6000, 1, 2, torch.float32, torch.device("cpu"))
    attention = TorchAttention(pool, [Span(0, 5000, 1000, cells)], (None,))
    masks = [group.mask.numel() for group in attention._groups[None] if group.mask is not None]
    assert max(masks) <= 2**19
    assert sum(len(group.rows_back) for group in attention._groups[None]) == 1000


def test_other_dtypes_attend_without_the_kernel_for_lone_tokens() -> None:
    scene = Scene([(30, 1), (4, 3), (9, 1)], 4)
    expected = [scene.run(operator(scene), layer) for layer in range(len(WINDOWS))]
    scene.pool.keys, scene.pool.values = scene.pool.keys.bfloat16(), scene.pool.values.bfloat16()
    scene.query, scene.key, scene.value = (part.bfloat16() for part in (scene.query, scene.key, scene.value))
    plans = plan_attention(scene.pool, scene.spans, WINDOWS, NUM_HEADS)
    assert all(len(unpack(plan).lone.rows) == 0 for plan in plans.values())
    for layer, exact in enumerate(expected):
        result = scene.run(OperatorAttention(scene.pool.keys, scene.pool.values, WINDOWS, plans), layer)
        torch.testing.assert_close(result.float(), exact, rtol=5e-2, atol=5e-2)


def test_the_operator_is_what_its_schema_and_fake_kernel_say() -> None:
    scene = Scene([(9, 1), (5, 6), (0, 3)], 5)
    plans = plan_attention(scene.pool, scene.spans, WINDOWS, NUM_HEADS)
    scene.pool.keys.nan_to_num_()  # the check compares copies, and NaN equals nothing
    scene.pool.values.nan_to_num_()
    for layer, window in enumerate(distinct_windows(WINDOWS)):
        plan = plans[window]
        arguments = (scene.query, scene.key, scene.value, scene.pool.keys, scene.pool.values, plan.table, plan.layout)
        torch.library.opcheck(
            torch.ops.raycomb.update_and_attend,
            (*arguments, layer, window),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )


def test_nan_stays_in_its_own_sequence() -> None:
    scene = Scene([(6, 1), (6, 1), (4, 3), (4, 3)], 3)
    scene.pool.keys[0, scene.spans[0].cells[2]] = torch.nan
    scene.pool.keys[0, scene.spans[2].cells[2]] = torch.nan
    result = scene.run(operator(scene), 0)
    assert result.isnan().flatten(1).any(1).tolist() == [True, False, True, True, True, False, False, False]


def test_pool_writes_only_the_named_cells_of_one_layer() -> None:
    pool = KvPool(2, 10, 1, 4, torch.float32, torch.device("cpu"))
    pool.keys.zero_()
    pool.values.zero_()
    pool.write(1, torch.tensor([7, 2]), torch.ones(2, 1, 4), torch.full((2, 1, 4), 3.0))
    assert pool.keys.sum(dim=(2, 3)).nonzero().tolist() == [[1, 2], [1, 7]]
    assert pool.values[1, 7].tolist() == [[3.0] * 4]
    assert pool.scratch_cell == 10

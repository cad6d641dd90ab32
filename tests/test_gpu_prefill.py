"""Prefill attention over shuffled cells, and the kernels that fill them, against float64.

Runs on a GPU, or without one in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_prefill.py
"""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from planner.errors import InvalidConfiguration
from tests.cuda_rig import tiny_model
from worker.attention import Span
from worker.cuda.memory import check_prefill
from worker.cuda.prefill import PrefillChain
from worker.cuda.prefill_attention import CellAttention, attend
from worker.cuda.prefill_plan import plan_prefill
from worker.cuda.write_cells import rotate_and_write
from worker.kv_pool import KvPool

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter")

# The interpreter multiplies bfloat16 matrices wrongly.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
MOST_ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Sequence(NamedTuple):
    """A chunk of `length` tokens behind `start` earlier ones."""

    start: int
    length: int


class Case(NamedTuple):
    spans: list[Span]
    pool: KvPool
    query: Tensor
    key: Tensor
    value: Tensor
    all_keys: list[Tensor]
    all_values: list[Tensor]


def make_case(sequences: list[Sequence], shape: Shape, dtype: torch.dtype) -> Case:
    """Sequences in shuffled cells of layer 1 of a pool; whatever no sequence wrote before is NaN."""
    rng = np.random.default_rng(0)
    needed = sum(s.start + s.length for s in sequences)
    num_cells = needed + 17
    # Cell 0 stays NaN: a kernel that reads it in place of nothing shows.
    order = (1 + rng.permutation(num_cells - 1)).astype(np.int32)
    pool = KvPool(2, num_cells, shape.num_kv_heads, shape.head_dim, dtype, DEVICE)
    pool.keys.fill_(torch.nan)
    pool.values.fill_(torch.nan)
    spans, all_keys, all_values = [], [], []
    row = taken = 0
    for start, length in sequences:
        cells = order[taken : taken + start + length]
        size = (start + length, shape.num_kv_heads, shape.head_dim)
        keys, values = (torch.randn(size, device=DEVICE).to(dtype) for _ in range(2))
        earlier = torch.from_numpy(cells[:start].astype(np.int64)).to(DEVICE)
        pool.write(1, earlier, keys[:start], values[:start])
        spans.append(Span(row, start, length, cells))
        all_keys.append(keys)
        all_values.append(values)
        row, taken = row + length, taken + start + length
    query = torch.randn(row, shape.num_heads, shape.head_dim, device=DEVICE).to(dtype)
    key = torch.cat([keys[s.start :] for keys, s in zip(all_keys, sequences, strict=True)])
    value = torch.cat([values[s.start :] for values, s in zip(all_values, sequences, strict=True)])
    return Case(spans, pool, query, key, value, all_keys, all_values)


def reference(query: Tensor, keys: Tensor, values: Tensor, start: int, window: int | None) -> Tensor:
    """One sequence in float64: `query` [length, H, D] from position `start` on, all its `keys` and `values`."""
    shared = query.shape[1] // keys.shape[1]
    q, k, v = (t.double() for t in (query, keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)))
    position = start + torch.arange(len(q), device=q.device)[:, None]
    seen = torch.arange(len(k), device=q.device)[None, :]
    visible = seen <= position
    if window is not None:
        visible &= seen > position - window
    scores = torch.einsum("thd,chd->htc", q, k) / q.shape[-1] ** 0.5
    weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), dim=-1)
    return torch.einsum("htc,chd->thd", weights, v)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def check(
    sequences: list[Sequence], shape: Shape, dtype: torch.dtype, window: int | None, most_rows: int = 256
) -> None:
    """The last `most_rows` and the first few tokens of every chunk agree with the reference."""
    case = make_case(sequences, shape, dtype)
    attention = CellAttention(case.pool, case.spans, [None, window], shape.num_heads)
    result = attention.attend(1, case.query, case.key, case.value)
    assert result.isfinite().all()
    for span, keys, values in zip(case.spans, case.all_keys, case.all_values, strict=True):
        for first, last in ((max(0, span.length - most_rows), span.length), (0, min(8, span.length))):
            rows = slice(span.row + first, span.row + last)
            visible = span.start + last
            expected = reference(case.query[rows], keys[:visible], values[:visible], span.start + first, window)
            assert error(result[rows], expected) < MOST_ERROR[dtype], (span.start, span.length)


RAGGED = [Sequence(0, 70), Sequence(5, 1), Sequence(100, 3), Sequence(33, 40), Sequence(0, 1), Sequence(150, 50)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 20, 64])
def test_ragged_chunks_with_history_attend_to_their_own_cells_only(dtype: torch.dtype, window: int | None) -> None:
    check(RAGGED, Shape(4, 2, 64), dtype, window)


@pytest.mark.parametrize(
    "shape", [Shape(4, 4, 64), Shape(7, 1, 80), Shape(6, 2, 96), Shape(8, 2, 128), Shape(3, 3, 16)], ids=str
)
def test_every_layout_of_heads_is_attended(shape: Shape) -> None:
    check(RAGGED, shape, torch.float16, None)


def test_rows_may_lie_apart_in_a_wider_tensor() -> None:
    case = make_case(RAGGED, Shape(4, 2, 64), torch.float32)
    wide = torch.randn(len(case.query), 9, 64, device=DEVICE)
    wide[:, :4], wide[:, 4:6], wide[:, 6:8] = case.query, case.key, case.value
    attention = CellAttention(case.pool, case.spans, [None, None], 4)
    narrow = attention.attend(1, case.query, case.key, case.value)
    assert torch.equal(attention.attend(1, wide[:, :4], wide[:, 4:6], wide[:, 6:8]), narrow)


def test_the_other_layer_and_the_other_cells_stay_as_they_are() -> None:
    case = make_case(RAGGED, Shape(4, 2, 64), torch.float32)
    attention = CellAttention(case.pool, case.spans, [None, None], 4)
    attention.attend(1, case.query, case.key, case.value)
    owned = torch.zeros(case.pool.num_cells + 1, dtype=torch.bool)
    owned[torch.from_numpy(np.concatenate([span.cells for span in case.spans]).astype(np.int64))] = True
    assert case.pool.keys[0].isnan().all()
    assert case.pool.values[1].cpu()[~owned].isnan().all()
    assert case.pool.values[1].cpu()[owned].isfinite().all()


def test_the_reference_sees_one_token_too_many() -> None:
    case = make_case([Sequence(10, 20)], Shape(4, 2, 64), torch.float32)
    right = reference(case.query, case.all_keys[0], case.all_values[0], 10, 8)
    assert error(reference(case.query, case.all_keys[0], case.all_values[0], 10, 9), right) > 1e-2


@needs_gpu
@pytest.mark.parametrize("window", [None, 4096])
def test_long_sequences_of_a_real_shape_are_attended(window: int | None) -> None:
    sequences = [Sequence(0, 1), Sequence(0, 4099), Sequence(31_000, 1768), Sequence(12_345, 1), Sequence(2047, 129)]
    check(sequences, Shape(32, 8, 128), torch.bfloat16, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_chunks_of_wide_tiles_beside_others(dtype: torch.dtype) -> None:
    """With sixteen rows a token 32 of them make a wide chunk; the last tiles are not full."""
    sequences = [Sequence(3, 33), Sequence(0, 31), Sequence(70, 41), Sequence(0, 1)]
    check(sequences, Shape(16, 1, 64), dtype, None)
    check(sequences, Shape(16, 1, 64), dtype, 20)


def test_only_chunks_that_fill_two_wide_tiles_take_them() -> None:
    sequences = [Sequence(0, 255), Sequence(0, 256), Sequence(0, 1000), Sequence(0, 8), Sequence(0, 9)]
    spans = make_case(sequences, Shape(2, 1, 16), torch.float32).spans
    plan = plan_prefill(spans, 2, DEVICE)
    alone = [[2, row] for row in range(1792, 256, -256)]
    assert plan.wide_tiles.tolist() == [*alone, [1, 256], [2, 256], [1, 0], [2, 0]]
    assert plan.long_tiles.tolist() == [[0, row] for row in (384, 256, 128, 0)] + [[4, 0]]
    assert plan.short_tiles.tolist() == [[3, 0]]


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("shape", [Shape(4, 2, 64), Shape(7, 1, 80), Shape(32, 8, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_are_rotated_and_keys_and_values_reach_their_cells(
    shape: Shape, has_norm: bool, dtype: torch.dtype
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    sequences = RAGGED[:3]
    case = make_case(sequences, shape, dtype)
    plan = plan_prefill(case.spans, num_heads // num_kv_heads, DEVICE)
    num_tokens = len(case.query)
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE).to(dtype)
    angles = torch.rand(256, head_dim // 2, device=DEVICE) * 6
    norms = [torch.rand(head_dim, device=DEVICE).to(dtype) + 0.5 for _ in range(2)] if has_norm else [None, None]
    query = torch.full_like(case.query, torch.nan)
    keys, values = case.pool.keys[1], case.pool.values[1]
    flat = qkv.view(num_tokens, -1)
    rotate_and_write(
        flat, plan.positions, plan.new_cells, angles.cos(), angles.sin(), keys, values, query, *norms, eps=1e-5
    )

    def expected(heads: Tensor, norm: Tensor | None) -> Tensor:
        x = heads.double()
        if norm is not None:
            x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
        angle = angles.double()[plan.positions.long()][:, None, :]
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), dim=-1)

    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    new_cells = plan.new_cells.long()
    most = MOST_ERROR[dtype]
    assert error(query, expected(q, norms[0])) < most
    assert error(keys[new_cells], expected(k, norms[1])) < most
    assert torch.equal(values[new_cells], v)


@needs_gpu
def test_a_captured_forward_attends_as_an_eager_one() -> None:
    case = make_case([Sequence(0, 300), Sequence(40, 2)], Shape(32, 8, 128), torch.bfloat16)
    plan = plan_prefill(case.spans, 4, DEVICE)
    eager = CellAttention(case.pool, case.spans, [None, None], 32).attend(1, case.query, case.key, case.value)
    out = torch.full_like(eager, torch.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(case.query, case.pool.keys[1], case.pool.values[1], plan, out)
    graph.replay()
    assert torch.equal(out, eager)


@needs_gpu
def test_a_forward_may_have_more_rows_than_a_grid_has_programs_on_an_axis() -> None:
    model = tiny_model()
    length, count = 250, 280
    pool = model.pool(length * count)
    chain = PrefillChain(model.decoder.config, model.decoder.weights, model.rotary, pool)
    tokens = torch.randint(0, 203, (count * length,), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def last_rows(first: int, end: int) -> Tensor:
        """Of sequences [first, end), run together."""
        cells = np.arange(count * length, dtype=np.int32).reshape(count, length)
        spans = [Span((index - first) * length, 0, length, cells[index]) for index in range(first, end)]
        rows = torch.arange(1, end - first + 1, device=DEVICE) * length - 1
        return chain.hidden(tokens[first * length : end * length], plan_prefill(spans, 2, DEVICE), rows)

    with torch.inference_mode():
        apart = torch.cat([last_rows(first, first + 70) for first in range(0, count, 70)])
        together = last_rows(0, count)
    assert torch.allclose(together, apart, atol=1e-4), (together - apart).abs().max()


def test_a_wider_prefill_than_kernels_can_count_is_refused_with_the_numbers() -> None:
    model = tiny_model()
    most = (2**31 - 1) // 64
    check_prefill(model.info(1024, (1, 2), most), model.decoder.config)
    with pytest.raises(InvalidConfiguration, match=f"max_prefill_tokens is {most + 1}; at 64 numbers .* {most} tokens"):
        check_prefill(model.info(1024, (1, 2), most + 1), model.decoder.config)

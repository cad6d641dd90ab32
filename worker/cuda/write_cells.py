# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803, N806
"""Puts packed tokens' keys and values into their cells on the GPU, as they are or straight from the qkv projection.

The second way fuses what otherwise takes a pass over memory each: the norm of query and key heads (Qwen3), rotary
positions (Su et al. 2021, halves rotated against each other) and the scatter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.cell_scales import head_scales, row_constants
from worker.cuda.e4m3 import as_e4m3


def write_cells(key: Tensor, value: Tensor, new_cells: Tensor, keys: Tensor, values: Tensor) -> None:
    """Row t of `key` and `value` [T, J, D] goes to cell `new_cells[t]`, int32[T], of one layer's `keys` and `values`
    [num_cells + 1, J, D], not scaled ones. Rows may be strided; heads and dimensions are contiguous."""
    num_tokens, num_kv_heads, head_dim = key.shape
    row_size = num_kv_heads * head_dim
    assert heads_are_together(key)
    assert heads_are_together(value)
    if num_tokens == 0:
        return
    _write[(num_tokens,)](
        key,
        value,
        new_cells,
        keys,
        values,
        key.stride(0),
        value.stride(0),
        ROW_SIZE=row_size,
        BLOCK=triton.next_power_of_2(row_size),
        num_warps=4 if row_size >= 1024 else 1,
    )


def heads_are_together(heads: Tensor) -> bool:
    """Whether the heads of each row of [T, J, D] lie end to end. A lone head's stride means nothing: a compiler may
    put any number there."""
    _, num_heads, head_dim = heads.shape
    return heads.stride(2) == 1 and (num_heads == 1 or heads.stride(1) == head_dim)


def rotate_and_write(
    qkv: Tensor,
    positions: Tensor,
    new_cells: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """From `qkv` [T, (H + 2 J) * D] write `query` [T, H, D], and keys and values into cells `new_cells`, int32[T].

    `positions` int32[T] index `cos`, `sin` [context, D / 2]. `query_norm` and `key_norm` [D] are the weights of an RMS
    norm over each head (both or neither). Arithmetic is float32, rounded once. `keys` and `values` are one layer's as
    `KvPool.layer` gives them; of another dtype than `qkv`, numbers that it does not hold become infinite.
    """
    num_tokens = qkv.shape[0]
    num_heads, head_dim = query.shape[1:]
    heads = qkv.shape[1] // head_dim
    num_kv_heads = (heads - num_heads) // 2
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(1) == 1
    assert query.is_contiguous()
    assert (query_norm is None) == (key_norm is None)
    if num_tokens == 0:
        return
    rows = row_constants(keys, num_kv_heads, head_dim)
    scaled = rows["SCALED"]
    _rotate_and_write[(num_tokens, triton.cdiv(heads, 16))](
        qkv,
        positions,
        new_cells,
        cos,
        sin,
        keys,
        values,
        keys.view(torch.float32) if scaled else keys,
        values.view(torch.float32) if scaled else values,
        query,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_HEADS=16,
        HAS_NORM=query_norm is not None,
        num_warps=4,
        **rows,
    )


@triton.jit
def _write(
    key, value, new_cells, keys, values, key_stride, value_stride, ROW_SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(new_cells + token).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_column = column < ROW_SIZE
    k = tl.load(key + token * key_stride + column, mask=is_column)
    v = tl.load(value + token * value_stride + column, mask=is_column)
    tl.store(keys + cell * ROW_SIZE + column, k, mask=is_column)
    tl.store(values + cell * ROW_SIZE + column, v, mask=is_column)


@triton.jit
def _rotate_and_write(
    qkv, positions, new_cells, cos, sin, keys, values, key_scales, value_scales, query, query_norm, key_norm,
    qkv_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HAS_NORM: tl.constexpr, CELL: tl.constexpr, SCALED: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_STRIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One token, BLOCK_HEADS of its heads: queries first, then keys, then values, as they lie in `qkv`. The two halves
    of a head are two tiles, since each turns with the other."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK_HEADS
    head = first + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    is_there = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dim < HALF)
    row = qkv + token * qkv_stride + (head * HEAD_DIM)[:, None] + dim
    low = tl.load(row, mask=is_there, other=0.0)
    high = tl.load(row + HALF, mask=is_there, other=0.0)
    new_cell = tl.load(new_cells + token).to(tl.int64)
    cell = new_cell * CELL
    scale_at = new_cell * SCALE_STRIDE + SCALES_AT
    if first + BLOCK_HEADS > NUM_HEADS + NUM_KV_HEADS:
        value_head = head - (NUM_HEADS + NUM_KV_HEADS)
        into = values + cell + (value_head * HEAD_DIM)[:, None] + dim
        is_value = is_there & (value_head >= 0)[:, None]
        if SCALED:
            _store_scaled(into, value_scales + scale_at + value_head, low, high, is_value, HALF, NATIVE)
        else:
            tl.store(into, low, mask=is_value)
            tl.store(into + HALF, high, mask=is_value)
    if first < NUM_HEADS + NUM_KV_HEADS:
        is_query = (head < NUM_HEADS)[:, None]
        x, y = low.to(tl.float32), high.to(tl.float32)
        if HAS_NORM:
            norm = tl.rsqrt(tl.sum(x * x + y * y, axis=1) / HEAD_DIM + eps)[:, None]
            x *= norm * _head_norm(query_norm, key_norm, dim, dim < HALF, is_query)
            y *= norm * _head_norm(query_norm + HALF, key_norm + HALF, dim, dim < HALF, is_query)
        angle = tl.load(positions + token).to(tl.int64) * HALF + dim
        c = tl.load(cos + angle, mask=dim < HALF, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=dim < HALF, other=0.0).to(tl.float32)
        first_half = x * c - y * s
        second_half = y * c + x * s
        if first < NUM_HEADS:
            into = query + token * NUM_HEADS * HEAD_DIM + (head * HEAD_DIM)[:, None] + dim
            tl.store(into, first_half.to(query.dtype.element_ty), mask=is_there & is_query)
            tl.store(into + HALF, second_half.to(query.dtype.element_ty), mask=is_there & is_query)
        if first + BLOCK_HEADS > NUM_HEADS:
            key_head = head - NUM_HEADS
            into = keys + cell + (key_head * HEAD_DIM)[:, None] + dim
            is_key = is_there & ((key_head >= 0) & (key_head < NUM_KV_HEADS))[:, None]
            if SCALED:
                _store_scaled(into, key_scales + scale_at + key_head, first_half, second_half, is_key, HALF, NATIVE)
            else:
                tl.store(into, first_half.to(keys.dtype.element_ty), mask=is_key)
                tl.store(into + HALF, second_half.to(keys.dtype.element_ty), mask=is_key)


@triton.jit
def _store_scaled(into, scales, low, high, is_head, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """Heads [n, 2 halves] as bytes at `into`, and their scales [n]."""
    x, y = tl.where(is_head, low, 0.0).to(tl.float32), tl.where(is_head, high, 0.0).to(tl.float32)
    largest = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), axis=1)
    scale = head_scales(largest, tl.sum(x * 0.0 + y * 0.0, axis=1))
    tl.store(into, as_e4m3(tl.div_rn(x, scale[:, None]), NATIVE), mask=is_head)
    tl.store(into + HALF, as_e4m3(tl.div_rn(y, scale[:, None]), NATIVE), mask=is_head)
    tl.store(scales, scale, mask=tl.max(is_head.to(tl.int32), axis=1) > 0)


@triton.jit
def _head_norm(query_norm, key_norm, dim, inside, is_query):
    """Norm weights [heads, dims] of a token's heads."""
    q = tl.load(query_norm + dim, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(key_norm + dim, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_query, q, k)

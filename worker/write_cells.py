# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803, N806
"""Puts packed tokens' keys and values into their cells on the GPU, as they are or straight from the qkv projection.

The second way fuses what otherwise takes a pass over memory each: the norm of query and key heads (Qwen3), rotary
positions (Su et al. 2021, halves rotated against each other) and the scatter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def write_cells(key: Tensor, value: Tensor, new_cells: Tensor, keys: Tensor, values: Tensor) -> None:
    """Row t of `key` and `value` [T, J, D] goes to cell `new_cells[t]`, int32[T], of one layer's `keys` and `values`
    [num_cells + 1, J, D]. Rows may be strided; heads and dimensions are contiguous. All of one dtype."""
    num_tokens, num_kv_heads, head_dim = key.shape
    row_size = num_kv_heads * head_dim
    assert key.stride()[1:] == (head_dim, 1)
    assert value.stride()[1:] == (head_dim, 1)
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
    norm over each head (both or neither). Arithmetic is float32, rounded once.
    """
    num_tokens = qkv.shape[0]
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = keys.shape[1]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim
    assert qkv.stride(1) == 1
    assert query.is_contiguous()
    assert (query_norm is None) == (key_norm is None)
    if num_tokens == 0:
        return
    heads = num_heads + 2 * num_kv_heads
    _rotate_and_write[(num_tokens, triton.cdiv(heads, 16))](
        qkv,
        positions,
        new_cells,
        cos,
        sin,
        keys,
        values,
        query,
        query_norm if query_norm is not None else qkv,
        key_norm if key_norm is not None else qkv,
        qkv.stride(0),
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_DIM=triton.next_power_of_2(head_dim),
        BLOCK_HEADS=16,
        HAS_NORM=query_norm is not None,
        num_warps=4,
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
    qkv, positions, new_cells, cos, sin, keys, values, query, query_norm, key_norm, qkv_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One token, sixteen of its heads: queries first, then keys, then values, as they lie in `qkv`."""
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    other_dim = (dim + HALF) % HEAD_DIM
    is_there = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dim < HEAD_DIM)[None, :]
    row = qkv + token * qkv_stride + (head * HEAD_DIM)[:, None]
    x = tl.load(row + dim[None, :], mask=is_there, other=0.0).to(tl.float32)
    other = tl.load(row + other_dim[None, :], mask=is_there, other=0.0).to(tl.float32)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    if HAS_NORM:
        norm = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        is_query = (head < NUM_HEADS)[:, None]
        x_weight = _head_norm(query_norm, key_norm, dim, is_query, HEAD_DIM)
        other_weight = _head_norm(query_norm, key_norm, other_dim, is_query, HEAD_DIM)
        x = tl.where(is_value, x, x * norm * x_weight)
        other = other * norm * other_weight
    angle = tl.load(positions + token).to(tl.int64) * HALF + dim % HALF
    c = tl.load(cos + angle).to(tl.float32)[None, :]
    s = tl.load(sin + angle).to(tl.float32)[None, :]
    rotated = x * c + other * tl.where(dim < HALF, -s, s)
    result = tl.where(is_value, x, rotated).to(query.dtype.element_ty)
    cell = tl.load(new_cells + token).to(tl.int64)
    tl.store(
        query + token * NUM_HEADS * HEAD_DIM + (head * HEAD_DIM)[:, None] + dim[None, :],
        result,
        mask=is_there & (head < NUM_HEADS)[:, None],
    )
    kv_head = head - NUM_HEADS
    into = cell * NUM_KV_HEADS * HEAD_DIM + dim[None, :]
    is_key = (kv_head >= 0)[:, None] & (kv_head < NUM_KV_HEADS)[:, None]
    tl.store(keys + into + (kv_head * HEAD_DIM)[:, None], result, mask=is_there & is_key)
    tl.store(values + into + ((kv_head - NUM_KV_HEADS) * HEAD_DIM)[:, None], result, mask=is_there & is_value)


@triton.jit
def _head_norm(query_norm, key_norm, dim, is_query, HEAD_DIM: tl.constexpr):
    """Norm weights [heads, dims] of a token's heads."""
    q = tl.load(query_norm + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    k = tl.load(key_norm + dim, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    return tl.where(is_query, q, k)

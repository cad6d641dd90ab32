"""Attention of lone tokens over the cells of their sequences, for decodes that bring query, key and value ready made.

One launch puts the new key and value into their cell and attends, another puts the parts together: splitting a context
over programs is Flash-Decoding's idea (Dao et al. 2023), the running softmax Milakov and Gimelshein's (2018). What is
launched depends on the number of tokens and on the heads, never on what sequences there are, so it can be captured. The
decode step of unquantized models fuses more: `decode_attention`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.cuda.decode_attention import LOG2_E, older_cells
from worker.cuda.decode_parts import leave_part
from worker.cuda.lone_plan import LonePlan
from worker.cuda.write_cells import heads_are_together

# Programs that a launch aims at, so that few tokens keep the whole device busy, and most parts of one context.
_PROGRAMS = 1024
_MAX_SPLITS = 64
# Cells that a part takes before another one is used; in units of 16.
_SHARE = 64
_BLOCK_CELLS = 64


def attend_lone(
    query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, plan: LonePlan, window: int | None
) -> Tensor:
    """Put `key` and `value` [T, J, D] into their cells of one layer's `keys` and `values` [num_cells + 1, J, D], and
    return [T, H, D] of `query` [T, H, D]: each token sees the `window` last positions of its sequence, itself
    included, or all.

    Rows of query, key and value may be strided; heads and dimensions are contiguous. All of one dtype; sums are
    float32. Waits for nothing.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    assert num_heads % num_kv_heads == 0
    assert num_tokens == len(plan.positions) == len(key) == len(value)
    assert query.dtype == key.dtype == value.dtype == keys.dtype == values.dtype
    assert all(heads_are_together(heads) for heads in (query, key, value))
    assert keys.is_contiguous()
    assert values.is_contiguous()
    splits = num_splits(num_tokens, num_kv_heads)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = num_tokens * num_heads * splits
    part_out = torch.empty((parts if splits > 1 else 0, head_dim), dtype=torch.float32, device=query.device)
    part_max, part_sum = torch.empty((2, max(parts, 1)), dtype=torch.float32, device=query.device).unbind(0)
    shape = {
        "HEADS": num_heads, "D": head_dim, "D_PADDED": max(16, triton.next_power_of_2(head_dim)), "SHARE": _SHARE,
        "WINDOWED": window is not None,
    }  # fmt: skip
    exact = query.dtype == torch.float32
    _attend[(num_kv_heads, splits, num_tokens)](
        query, key, value, keys, values, out, part_out, part_max, part_sum,
        plan.positions, plan.firsts, plan.new_cells, plan.cells,
        query.stride(0), key.stride(0), value.stride(0), splits, 0 if window is None else window,
        head_dim**-0.5 * LOG2_E,
        KV_HEADS=num_kv_heads, GROUP_PADDED=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        BLOCK=_BLOCK_CELLS, **shape, num_warps=4, num_stages=1 if exact else 3,
    )  # fmt: skip
    if splits > 1:
        _combine[(num_heads, num_tokens)](
            part_out, part_max, part_sum, out, plan.positions, splits, 0 if window is None else window,
            MAX_SPLITS=_MAX_SPLITS, **shape, num_warps=4,
        )  # fmt: skip
    return out


def num_splits(num_tokens: int, num_kv_heads: int) -> int:
    """Parts that a context is cut into at most: a power of two."""
    splits = _MAX_SPLITS
    while splits > 1 and splits * num_tokens * num_kv_heads > _PROGRAMS:
        splits //= 2
    return splits


@triton.jit
def _used(num_cells, splits, SHARE: tl.constexpr):
    """Of `splits` programs, those that have work."""
    return tl.minimum(tl.maximum(tl.cdiv(num_cells, SHARE), 1), splits)


@triton.jit(do_not_specialize=["splits", "window"])
def _attend(
    query, key, value, keys, values, out, part_out, part_max, part_sum, positions, firsts, new_cells, cells,
    query_stride, key_stride, value_stride, splits, window, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr,
    SHARE: tl.constexpr, BLOCK: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, splits, T): one query group of one token, over one part of its context. The first part holds the
    new token, which is read from registers: nothing here depends on another program's write. With one split this
    writes out [T, HEADS, D], else part_out fp32 [T, HEADS, splits, D], part_max and part_sum [T, HEADS, splits]."""
    kv_head, split = tl.program_id(0), tl.program_id(1)
    token = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    position = tl.load(positions + token)
    begin, end = 0, position
    if WINDOWED:
        begin = tl.maximum(position + 1 - window, 0)
    used = _used(end - begin, splits, SHARE)
    if split >= used:
        return
    share = tl.cdiv(tl.cdiv(end - begin, used), 16) * 16
    begin = begin + split * share
    end = tl.minimum(begin + share, end)

    dims = tl.arange(0, D_PADDED)[None, :]
    valid = dims < D
    group = tl.arange(0, GROUP_PADDED)
    heads = kv_head * GROUP + group
    mine = (group < GROUP)[:, None] & valid
    row = token.to(tl.int64)
    q = tl.load(query + row * query_stride + heads[:, None] * D + dims, mask=mine, other=0.0)
    k = tl.load(key + row * key_stride + kv_head * D + dims, mask=valid, other=0.0)
    v = tl.load(value + row * value_stride + kv_head * D + dims, mask=valid, other=0.0)
    first = split == 0
    cell = tl.load(new_cells + token).to(tl.int64) * (KV_HEADS * D) + kv_head * D
    tl.store(keys + cell + dims, k, mask=valid & first)
    tl.store(values + cell + dims, v, mask=valid & first)
    new = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
    largest = tl.where(first, new, float("-inf"))
    total = tl.where(first, tl.full([GROUP_PADDED], 1.0, tl.float32), 0.0)
    acc = tl.zeros([GROUP_PADDED, D_PADDED], tl.float32) + tl.where(first, v.to(tl.float32), 0.0)
    largest, total, acc = older_cells(
        q, largest, total, acc, cells + tl.load(firsts + token), keys + kv_head * D, values + kv_head * D, begin, end,
        dims, scale, KV_HEADS * D, D, BLOCK,
    )  # fmt: skip
    at = token * HEADS + heads
    if splits == 1:
        tl.store(out + at[:, None] * D + dims, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
    else:
        leave_part(part_out, part_max, part_sum, at * splits + split, acc, largest, total, dims, mine, group < GROUP, D)


@triton.jit(do_not_specialize=["splits", "window"])
def _combine(
    part_out, part_max, part_sum, out, positions, splits, window,
    HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, SHARE: tl.constexpr, MAX_SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """Grid (HEADS, T): the parts of one head of one token into out [T, HEADS, D]."""
    token = tl.program_id(1)
    head = token * HEADS + tl.program_id(0)
    num_cells = tl.load(positions + token)
    if WINDOWED:
        num_cells = tl.minimum(num_cells, window - 1)
    lanes = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, D_PADDED)
    there = lanes < _used(num_cells, splits, SHARE)
    at = head * splits + lanes
    largest = tl.load(part_max + at, mask=there, other=float("-inf"))
    weight = tl.exp2(largest - tl.max(largest, axis=0))
    total = tl.sum(weight * tl.load(part_sum + at, mask=there, other=0.0), axis=0)
    mask = there[:, None] & (dims < D)[None, :]
    acc = tl.load(part_out + at[:, None] * D + dims[None, :], mask=mask, other=0.0)
    whole = tl.sum(acc * weight[:, None], axis=0) / total
    tl.store(out + head * D + dims, whole.to(out.dtype.element_ty), mask=dims < D)

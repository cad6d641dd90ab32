"""Attention of one new token a row over the cells of its sequence, with all that surrounds it in one kernel.

A program is the whole query group of one KV head: it sums the projections' partials, adds the bias, norms and rotates
q and k, writes the new token's K and V to their cell, and attends. The new token takes part from registers and the
loop reads only older cells, so nothing in the launch depends on another program's write. The running softmax is
Milakov and Gimelshein's (2018); splitting the context over programs is Flash-Decoding's idea (Dao et al. 2023).

Not for prefill: there each row has its own number of tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = 1.4426950408889634


@triton.jit
def _summed(partials, offsets, inside, split_stride, SPLITS: tl.constexpr):
    value = tl.load(partials + offsets, mask=inside, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(partials + split * split_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _rotated(
    qkv, row_start, head_starts, dims, inside, bias, norm, cos, sin, position, split_stride, eps,
    D: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Heads [n, dims] in fp32 after bias, norm and rotation. The other half of each rotated pair is loaded a second
    time rather than moved between lanes."""
    half: tl.constexpr = D // 2
    other = tl.where(dims < half, dims + half, dims - half)
    pair = tl.where(dims < half, dims, dims - half)
    x = _summed(qkv, row_start + head_starts + dims, inside, split_stride, SPLITS)
    y = _summed(qkv, row_start + head_starts + other, inside, split_stride, SPLITS)
    if HAS_BIAS:
        x += tl.load(bias + head_starts + dims, mask=inside, other=0.0).to(tl.float32)
        y += tl.load(bias + head_starts + other, mask=inside, other=0.0).to(tl.float32)
    valid = dims < D
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x *= scale * tl.load(norm + dims, mask=valid, other=0.0).to(tl.float32)
        y *= scale * tl.load(norm + other, mask=valid, other=0.0).to(tl.float32)
    c = tl.load(cos + position * half + pair, mask=valid, other=0.0)
    s = tl.load(sin + position * half + pair, mask=valid, other=0.0)
    return x * c + tl.where(dims < half, -y, y) * s


@triton.jit
def _splits_used(num_cells, SPLITS: tl.constexpr, SHARE: tl.constexpr):
    """Of SPLITS programs, those that have work: a split takes SHARE cells before another one is used."""
    return tl.minimum(tl.maximum(tl.cdiv(num_cells, SHARE), 1), SPLITS)


@triton.jit
def _combined(part_out, part_max, part_sum, at, dims, inside, used, SPLITS: tl.constexpr, D: tl.constexpr):
    """Heads [n, dims] of the whole context from the first `used` partial results of heads `at` [n]. The first split
    holds the new token, so the largest score is finite."""
    none = float("-inf")
    largest = tl.load(part_max + at * SPLITS, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        score = tl.load(part_max + at * SPLITS + split, mask=at * 0 + split < used, other=none, cache_modifier=".cg")
        largest = tl.maximum(largest, score)
    total = tl.zeros_like(largest)
    acc = tl.zeros_like(at[:, None] + dims).to(tl.float32)
    for split in tl.static_range(SPLITS):
        there = at * 0 + split < used
        score = tl.load(part_max + at * SPLITS + split, mask=there, other=none, cache_modifier=".cg")
        weight = tl.exp2(score - largest)
        total += weight * tl.load(part_sum + at * SPLITS + split, mask=there, other=0.0, cache_modifier=".cg")
        offsets = (at * SPLITS + split)[:, None] * D + dims
        mask = inside & there[:, None]
        acc += weight[:, None] * tl.load(part_out + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return acc / total[:, None]


@triton.jit
def _older_cells(
    q, largest, total, acc, cells, k_heads, v_heads, begin, end, dims, scale,
    CELL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Goes on with a running softmax over positions [begin, end). Lanes past the end read the last cell again, so that
    a row never touches a cell of another sequence."""
    lanes = tl.arange(0, BLOCK)
    inside = dims < D
    for start in range(begin, end, BLOCK):
        at = start + lanes
        cell = tl.load(cells + tl.minimum(at, end - 1)).to(tl.int64) * CELL
        k = tl.load(k_heads + cell[None, :] + tl.trans(dims), mask=tl.trans(inside), other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale
        scores = tl.where((at < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        kept = tl.exp2(largest - higher)
        p = tl.exp2(scores - higher[:, None])
        v = tl.load(v_heads + cell[:, None] + dims, mask=inside, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
        total = total * kept + tl.sum(p, axis=1)
        largest = higher
    return largest, total, acc


@triton.jit(do_not_specialize=["split_stride", "table_stride", "window"])
def attention_kernel(
    qkv, split_stride, bias, q_norm, k_norm, cos, sin, row_slots, length, new_cells, table, table_stride,
    k_pool, v_pool, out, part_out, part_max, part_sum, arrived, scale, eps, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr, QKV_SPLITS: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, WINDOWED: tl.constexpr,
    LAST_REDUCES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, SPLITS, rows). qkv [QKV_SPLITS, rows, (HEADS + 2 KV_HEADS) D]; pools [cells, KV_HEADS, D];
    `scale` is the softmax scale times log2 e. A captured grid cannot follow the context, so a row uses as many of its
    SPLITS as there are shares of SHARE cells, and the other programs leave at once. SPLITS = 1 writes out
    [rows, HEADS D]; else partial results part_out fp32 [rows, HEADS, SPLITS, D], part_max and part_sum
    [rows, HEADS, SPLITS] are reduced by the last program of a (row, KV head) to arrive if LAST_REDUCES (`arrived` int32
    [rows, KV_HEADS] is zero before and after), else by `reduce_kernel`."""
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    COLUMNS: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    CELL: tl.constexpr = KV_HEADS * D
    dims = tl.arange(0, D_PADDED)[None, :]
    group = tl.arange(0, GROUP_PADDED)
    heads = kv_head * GROUP + group
    mine = (group < GROUP)[:, None] & (dims < D)
    if PDL:
        gdc_wait()
    slot = tl.load(row_slots + row).to(tl.int64)
    position = tl.load(length + slot)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(position + 1 - window, 0)
    used = _splits_used(position - begin, SPLITS, SHARE)
    if split >= used:
        return
    new_cell = tl.load(new_cells + row).to(tl.int64)

    one = tl.zeros([1, 1], tl.int32)
    k_start = one + (HEADS + kv_head) * D
    v_start = k_start + KV_HEADS * D
    row_start = row * COLUMNS
    valid = dims < D
    q = _rotated(qkv, row_start, heads[:, None] * D, dims, mine, bias, q_norm, cos, sin, position, split_stride, eps,
                 D, QKV_SPLITS, HAS_BIAS, QK_NORM)  # fmt: skip
    k = _rotated(qkv, row_start, k_start, dims, valid, bias, k_norm, cos, sin, position, split_stride, eps,
                 D, QKV_SPLITS, HAS_BIAS, QK_NORM)  # fmt: skip
    v = _summed(qkv, row_start + v_start + dims, valid, split_stride, QKV_SPLITS)
    if HAS_BIAS:
        v += tl.load(bias + v_start + dims, mask=valid, other=0.0).to(tl.float32)
    q = q.to(k_pool.dtype.element_ty)
    k = k.to(k_pool.dtype.element_ty)
    v = v.to(v_pool.dtype.element_ty)
    first = split == 0
    tl.store(k_pool + new_cell * CELL + kv_head * D + dims, k, mask=valid & first)
    tl.store(v_pool + new_cell * CELL + kv_head * D + dims, v, mask=valid & first)

    own = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1) * scale
    largest = tl.where(first, own, float("-inf"))
    total = tl.where(first, tl.full([GROUP_PADDED], 1.0, tl.float32), 0.0)
    acc = tl.zeros([GROUP_PADDED, D_PADDED], tl.float32) + tl.where(first, v.to(tl.float32), 0.0)
    end = position
    if SPLITS > 1:
        # In units of 16 cells, so that a ragged length does not cost its first split a whole block more.
        share = tl.cdiv(tl.cdiv(position - begin, used), 16) * 16
        begin = begin + split * share
        end = tl.minimum(begin + share, position)
    largest, total, acc = _older_cells(
        q, largest, total, acc, table + slot * table_stride, k_pool + kv_head * D, v_pool + kv_head * D,
        begin, end, dims, scale, CELL, D, BLOCK,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()

    head_at = row * HEADS + heads
    if SPLITS == 1:
        tl.store(out + head_at[:, None] * D + dims, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
    else:
        part = head_at * SPLITS + split
        tl.store(part_out + part[:, None] * D + dims, acc, mask=mine)
        tl.store(part_max + part, largest, mask=group < GROUP)
        tl.store(part_sum + part, total, mask=group < GROUP)
        if LAST_REDUCES:
            tl.debug_barrier()
            turn = tl.atomic_add(arrived + row * KV_HEADS + kv_head, 1, sem="acq_rel", scope="gpu")
            if turn == used - 1:
                tl.store(arrived + row * KV_HEADS + kv_head, 0)
                own_heads = row * HEADS + kv_head * GROUP + tl.minimum(group, GROUP - 1)
                whole = _combined(part_out, part_max, part_sum, own_heads, dims, mine, used, SPLITS, D)
                tl.store(out + head_at[:, None] * D + dims, whole.to(out.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=["window"])
def reduce_kernel(
    part_out, part_max, part_sum, out, row_slots, length, window,
    HEADS: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (HEADS, rows): the partial results of `attention_kernel` into out [rows, HEADS D]."""
    row = tl.program_id(1)
    head = row * HEADS + tl.program_id(0)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, D_PADDED)
    if PDL:
        gdc_wait()
    num_cells = tl.load(length + tl.load(row_slots + row))
    if WINDOWED:
        num_cells = tl.minimum(num_cells, window - 1)
    there = splits < _splits_used(num_cells, SPLITS, SHARE)
    at = head * SPLITS + splits
    score = tl.load(part_max + at, mask=there, other=float("-inf"))
    weight = tl.exp2(score - tl.max(score, axis=0))
    total = tl.sum(weight * tl.load(part_sum + at, mask=there, other=0.0), axis=0)
    mask = there[:, None] & (dims < D)[None, :]
    acc = tl.load(part_out + at[:, None] * D + dims[None, :], mask=mask, other=0.0)
    whole = tl.sum(acc * weight[:, None], axis=0) / total
    if PDL:
        gdc_launch_dependents()
    tl.store(out + head * D + dims, whole.to(out.dtype.element_ty), mask=dims < D)

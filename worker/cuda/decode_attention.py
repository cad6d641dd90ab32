"""Attention of one new token a row over the cells of its sequence, with all that surrounds it in one kernel.

A program is the whole query group of one KV head: it sums the projections' partials, adds the bias, norms and rotates
q and k, writes the new token's K and V to their cell, and attends. The new token takes part from registers and the
loop reads only older cells, so nothing in the launch depends on another program's write. The running softmax is
Milakov and Gimelshein's (2018); splitting the context over programs is Flash-Decoding's idea (Dao et al. 2023). Few
rows have a fixed number of programs each; many rows share the pieces that `decode_work` lists.

Not for prefill: there each row has its own number of tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.cell_scales import head_scales
from worker.cuda.decode_parts import arrives_last, combined, combined_pieces, leave_part, splits_used
from worker.cuda.decode_plan import ITEM_WORDS
from worker.cuda.decode_scaled import older_scaled_cells
from worker.cuda.e4m3 import as_e4m3

LOG2_E = 1.4426950408889634
_ITEM_WORDS = tl.constexpr(ITEM_WORDS)


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
def _new_token(
    qkv, row_start, kv_head, heads, dims, mine, bias, q_norm, k_norm, cos, sin, position, split_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    QK_NORM: tl.constexpr,
):  # fmt: skip
    """The new token's queries `heads` [n, dims], and one head's key and value [1, dims], in fp32."""
    k_start = tl.zeros([1, 1], tl.int32) + (HEADS + kv_head) * D
    v_start = k_start + KV_HEADS * D
    valid = dims < D
    q = _rotated(qkv, row_start, heads[:, None] * D, dims, mine, bias, q_norm, cos, sin, position, split_stride, eps,
                 D, SPLITS, HAS_BIAS, QK_NORM)  # fmt: skip
    k = _rotated(qkv, row_start, k_start, dims, valid, bias, k_norm, cos, sin, position, split_stride, eps,
                 D, SPLITS, HAS_BIAS, QK_NORM)  # fmt: skip
    v = _summed(qkv, row_start + v_start + dims, valid, split_stride, SPLITS)
    if HAS_BIAS:
        v += tl.load(bias + v_start + dims, mask=valid, other=0.0).to(tl.float32)
    return q, k, v


@triton.jit
def _stored(x, into, scale_into, mask, is_mine, SCALED: tl.constexpr, NATIVE: tl.constexpr):
    """A head [1, dims] in fp32 into its row, if it `is_mine`; returns what readers will find there."""
    if SCALED:
        scale = head_scales(tl.max(tl.abs(x), axis=1), tl.sum(x * 0.0, axis=1))
        rounded = as_e4m3(tl.div_rn(x, scale[:, None]), NATIVE)
        tl.store(into, rounded, mask=mask)
        tl.store(scale_into + tl.arange(0, 1), scale, mask=is_mine)
        return rounded.to(tl.float16).to(tl.float32) * scale[:, None]
    rounded = x.to(into.dtype.element_ty)
    tl.store(into, rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def _weighed(q, k, v, there, largest, total, acc, scale):
    """A running softmax after a block of keys [dims, BLOCK] and values [BLOCK, dims], one of which is `there`."""
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
    scores = tl.where(there[None, :], scores, float("-inf"))
    higher = tl.maximum(largest, tl.max(scores, axis=1))
    kept = tl.exp2(largest - higher)
    p = tl.exp2(scores - higher[:, None])
    acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * kept[:, None], input_precision="ieee")
    return higher, total * kept + tl.sum(p, axis=1), acc


@triton.jit
def _first_cells(
    cells, k_heads, v_heads, begin, end, dims, CELL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The first block of positions [begin, end), as `_weighed` takes keys and values: zeros where there is none."""
    at = begin + tl.arange(0, BLOCK)
    there, inside = at < end, dims < D
    cell = tl.load(cells + at, mask=there, other=0).to(tl.int64) * CELL
    k = tl.load(k_heads + cell[None, :] + tl.trans(dims), mask=there[None, :] & tl.trans(inside), other=0.0)
    v = tl.load(v_heads + cell[:, None] + dims, mask=there[:, None] & inside, other=0.0)
    return k, v


@triton.jit
def _in_flight(x):
    """The same numbers, by an instruction that the compiler moves past no wait: what loads them is then not waited for
    in front of it."""
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=32 // x.dtype.primitive_bitwidth
    )


@triton.jit
def older_cells(
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
        v = tl.load(v_heads + cell[:, None] + dims, mask=inside, other=0.0)
        largest, total, acc = _weighed(q, k, v, at < end, largest, total, acc, scale)
    return largest, total, acc


@triton.jit
def _leave(
    acc, largest, total, row, kv_head, heads, group, dims, mine, out, part_out, part_max, part_sum, arrived, used,
    split, first_piece,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """A row's attention into `out` if this program has all of it; else its part, and the whole if it is the last one
    to arrive."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    head_at = row * HEADS + heads
    if SPLITS == 1 and not LISTED:
        tl.store(out + head_at[:, None] * D + dims, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
    elif LISTED:
        if used == 1:
            tl.store(out + head_at[:, None] * D + dims, (acc / total[:, None]).to(out.dtype.element_ty), mask=mine)
        else:
            part = tl.program_id(1) * HEADS + heads
            leave_part(part_out, part_max, part_sum, part, acc, largest, total, dims, mine, group < GROUP, D)
            if arrives_last(arrived + row * KV_HEADS + kv_head, used):
                own = first_piece * HEADS + kv_head * GROUP + tl.minimum(group, GROUP - 1)
                whole = combined_pieces(part_out, part_max, part_sum, own, dims, mine, used, HEADS, D)
                tl.store(out + head_at[:, None] * D + dims, whole.to(out.dtype.element_ty), mask=mine)
    else:
        part = head_at * SPLITS + split
        leave_part(part_out, part_max, part_sum, part, acc, largest, total, dims, mine, group < GROUP, D)
        if arrives_last(arrived + row * KV_HEADS + kv_head, used):
            own = row * HEADS + kv_head * GROUP + tl.minimum(group, GROUP - 1)
            whole = combined(part_out, part_max, part_sum, own, dims, mine, used, SPLITS, D)
            tl.store(out + head_at[:, None] * D + dims, whole.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _share_of(
    row_slots, length, new_cells, work, num_pieces, window,
    SPLITS: tl.constexpr, SHARE: tl.constexpr, WINDOWED: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """What a program is to attend to: the row, its slot, position and new cell; the row's first piece, how many
    programs it has and which of them this is; the positions [begin, end) of older tokens; whether there is nothing."""
    first_piece = 0
    if LISTED:
        item = work + tl.program_id(1) * _ITEM_WORDS
        row, slot, position = tl.load(item), tl.load(item + 1).to(tl.int64), tl.load(item + 2)
        new_cell, first_piece = tl.load(item + 3).to(tl.int64), tl.load(item + 4)
        used, split = tl.maximum(tl.load(item + 5), 1), tl.load(item + 6)
        idle = tl.program_id(1) >= tl.load(num_pieces)
    else:
        split = tl.program_id(1)
        row = tl.program_id(2)
        slot = tl.load(row_slots + row).to(tl.int64)
        position = tl.load(length + slot)
        new_cell = tl.load(new_cells + row).to(tl.int64)
    begin, end = 0, position
    if WINDOWED:
        begin = tl.maximum(position + 1 - window, 0)
    if not LISTED:
        used = splits_used(position - begin, SPLITS, SHARE)
        idle = split >= used
    if SPLITS > 1 or LISTED:
        # In units of 16 cells, so that a ragged length does not cost its first split a whole block more.
        share = tl.cdiv(tl.cdiv(position - begin, used), 16) * 16
        begin = begin + split * share
        end = tl.minimum(begin + share, position)
    return row, slot, position, new_cell, first_piece, used, split, begin, end, idle


@triton.jit(do_not_specialize=["split_stride", "table_stride", "window"])
def attention_kernel(
    qkv, split_stride, bias, q_norm, k_norm, cos, sin, row_slots, length, new_cells, table, table_stride,
    k_pool, v_pool, k_scales, v_scales, out, part_out, part_max, part_sum, arrived, work, num_pieces, scale, eps,
    window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr, QKV_SPLITS: tl.constexpr, SPLITS: tl.constexpr, SHARE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, QK_NORM: tl.constexpr, WINDOWED: tl.constexpr,
    LISTED: tl.constexpr, CELL: tl.constexpr, SCALED: tl.constexpr,
    SCALES_AT: tl.constexpr, SCALE_STRIDE: tl.constexpr, FIRST: tl.constexpr, LIST_WAITS: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (KV_HEADS, SPLITS, rows). qkv [QKV_SPLITS, rows, (HEADS + 2 KV_HEADS) D]; pools [cells, KV_HEADS, D], or
    scaled rows, whose float32 words are `k_scales` and `v_scales` (`worker.cuda.cell_scales.row_constants`);
    `scale` is the softmax scale times log2 e. A captured grid cannot follow the context, so a row uses as many of its
    SPLITS as there are shares of SHARE cells, and the other programs leave at once. SPLITS = 1 writes out
    [rows, HEADS D]; else partial results part_out fp32 [rows, HEADS, SPLITS, D], part_max and part_sum
    [rows, HEADS, SPLITS] are reduced by the last program of a (row, KV head) to arrive (`arrived` int32
    [rows, KV_HEADS] is zero before and after).

    LISTED: grid (KV_HEADS, pieces), and `work` and `num_pieces` as `decode_work.list_pieces` leaves them; part_out
    [pieces, HEADS, D], part_max and part_sum [pieces, HEADS]; the last program of a row to arrive reduces.

    As a dependent it looks up before it waits what no kernel between the step's first and its last writes: its cells
    and, if FIRST, the keys and values of a block of them. LIST_WAITS: the list may not be whole by then."""
    kv_head = tl.program_id(0)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    COLUMNS: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    dims = tl.arange(0, D_PADDED)[None, :]
    group = tl.arange(0, GROUP_PADDED)
    heads = kv_head * GROUP + group
    mine = (group < GROUP)[:, None] & (dims < D)
    if PDL and LIST_WAITS:
        gdc_wait()
    row, slot, position, new_cell, first_piece, used, split, begin, end, idle = _share_of(
        row_slots, length, new_cells, work, num_pieces, window, SPLITS, SHARE, WINDOWED, LISTED,
    )  # fmt: skip
    cells = table + slot * table_stride
    if FIRST:
        first_k, first_v = _first_cells(
            cells, k_pool + kv_head * D, v_pool + kv_head * D, begin, tl.where(idle, begin, end), dims, CELL, D, BLOCK,
        )  # fmt: skip
    if PDL and not LIST_WAITS:
        gdc_wait()
    if PDL:
        gdc_launch_dependents()
    if idle:
        return

    if FIRST and PDL:
        first_k, first_v = _in_flight(first_k), _in_flight(first_v)
    valid = dims < D
    q, k, v = _new_token(
        qkv, row * COLUMNS, kv_head, heads, dims, mine, bias, q_norm, k_norm, cos, sin, position, split_stride, eps,
        HEADS, KV_HEADS, D, QKV_SPLITS, HAS_BIAS, QK_NORM,
    )  # fmt: skip
    first = split == 0
    row_at = new_cell * CELL + kv_head * D
    scale_at = new_cell * SCALE_STRIDE + SCALES_AT + kv_head
    k = _stored(k, k_pool + row_at + dims, k_scales + scale_at, valid & first, first, SCALED, NATIVE)
    v = _stored(v, v_pool + row_at + dims, v_scales + scale_at, valid & first, first, SCALED, NATIVE)
    q = q.to(out.dtype.element_ty)
    new = tl.sum(q.to(tl.float32) * k, axis=1) * scale
    largest = tl.where(first, new, float("-inf"))
    total = tl.where(first, tl.full([GROUP_PADDED], 1.0, tl.float32), 0.0)
    acc = tl.zeros([GROUP_PADDED, D_PADDED], tl.float32) + tl.where(first, v, 0.0)
    if SCALED:
        largest, total, acc = older_scaled_cells(
            q, largest, total, acc, cells, k_pool + kv_head * D, v_pool + kv_head * D,
            k_scales + SCALES_AT + kv_head, v_scales + SCALES_AT + kv_head, begin, end, scale,
            CELL, D, D_PADDED, GROUP_PADDED, BLOCK, SCALE_STRIDE, NATIVE,
        )  # fmt: skip
    else:
        if FIRST:
            if begin < end:
                there = begin + tl.arange(0, BLOCK) < end
                largest, total, acc = _weighed(q, first_k, first_v, there, largest, total, acc, scale)
            begin += BLOCK
        largest, total, acc = older_cells(
            q, largest, total, acc, cells, k_pool + kv_head * D, v_pool + kv_head * D, begin, end, dims, scale,
            CELL, D, BLOCK,
        )  # fmt: skip
    _leave(
        acc, largest, total, row, kv_head, heads, group, dims, mine, out, part_out, part_max, part_sum, arrived, used,
        split, first_piece, HEADS, KV_HEADS, D, SPLITS, LISTED,
    )  # fmt: skip

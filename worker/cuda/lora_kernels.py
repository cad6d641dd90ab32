"""Adapters' low-rank products on the GPU: narrow = x down.T, then product += narrow up.T, each row with its own slot's.

One launch serves all rows, whatever adapter each has or lacks: matrices of all slots lie at fixed strides, and a
program finds its rows' in the table of slots (the batched gather product of Punica, Chen et al. 2023, and S-LoRA, Sheng
et al. 2023). Few rows take a program each and plain multiply-adds; many are taken in tiles, through the tensor cores,
once for each adapter that a tile holds. Sums are float32.

All kernels: `row_slots` int32[rows], below 0 for a row without an adapter, whose product is left as it is. `downs`
[slots, P, R, K] and `ups` [slots, N, R] of one layer, `DOWN_STRIDE` and `UP_STRIDE` elements from one slot to the next,
are zero beyond a part's rank. `ranks` int32, `RANK_STRIDE` from one slot to the next: the highest of a slot's P parts,
rounded up to whole blocks of ranks, 0 for none; R is such a multiple. Of `narrow` float32[rows, P, R] nothing beyond is
written or read; tiles have SPLITS such tables, whose sum counts. The N columns of `product` are `FIRST` of the first
part and `REST` of each further one.

Launched as programmatic dependents, every program waits before it leaves: if all left without, the kernel behind would
begin before the one in front has ended. Matrices and slots are written between steps only, so those of lone rows are
asked for before; and the first kernel lets the second one begin at once, to ask for its own.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize_on_alignment=["ranks"])
def shrink_rows_kernel(
    x, row_slots, downs, ranks, narrow,
    K: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, DOWN_STRIDE: tl.constexpr, RANK_STRIDE: tl.constexpr,
    RANKS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, PARTS * R / RANKS): so many of one row's narrow values, of x [rows, K]."""
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = R // RANKS
    part, first = tl.program_id(1) // blocks, tl.program_id(1) % blocks * RANKS
    depth = tl.arange(0, DEPTH)
    slot = tl.load(row_slots + row).to(tl.int64)
    rank = tl.load(ranks + slot * RANK_STRIDE, mask=slot >= 0, other=0)
    down = downs + slot * DOWN_STRIDE + ((part * R + first + tl.arange(0, RANKS)) * K)[:, None]
    weight = tl.load(down + depth[None, :], mask=(first < rank) & (depth < K)[None, :], other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if first >= rank:
        return
    value = tl.load(x + row * K + depth, mask=depth < K, other=0.0)
    acc = weight.to(tl.float32) * value.to(tl.float32)[None, :]
    for k in range(DEPTH, K, DEPTH):
        inside = k + depth < K
        weight = tl.load(down + (k + depth)[None, :], mask=inside[None, :], other=0.0)
        value = tl.load(x + row * K + k + depth, mask=inside, other=0.0)
        acc += weight.to(tl.float32) * value.to(tl.float32)[None, :]
    into = narrow + (row * PARTS + part) * R + first + tl.arange(0, RANKS)
    tl.store(into, tl.sum(acc, axis=1))


@triton.jit
def _columns_of(program, FIRST: tl.constexpr, REST: tl.constexpr, COLUMNS: tl.constexpr):
    """The part that this block of columns is of, its first column, and where the part ends."""
    first_blocks: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    rest_blocks: tl.constexpr = (REST + COLUMNS - 1) // COLUMNS + (REST == 0)
    later = program - first_blocks
    part = tl.where(later < 0, 0, 1 + later // rest_blocks)
    begin = tl.where(later < 0, program * COLUMNS, FIRST + (part - 1) * REST + later % rest_blocks * COLUMNS)
    return part, begin, FIRST + part * REST


@triton.jit(do_not_specialize_on_alignment=["ranks"])
def expand_rows_kernel(
    narrow, row_slots, ups, ranks, product,
    N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    UP_STRIDE: tl.constexpr, RANK_STRIDE: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns): adds to one row of product [rows, N]."""
    row = tl.program_id(0).to(tl.int64)
    part, begin, end = _columns_of(tl.program_id(1), FIRST, REST, COLUMNS)
    columns = tl.arange(0, COLUMNS)
    inside = begin + columns < end
    r = tl.arange(0, RANKS)
    slot = tl.load(row_slots + row).to(tl.int64)
    rank = tl.load(ranks + slot * RANK_STRIDE, mask=slot >= 0, other=0)
    up = ups + slot * UP_STRIDE + begin * R + (columns * R)[:, None] + r[None, :]
    weight = tl.load(up, mask=(rank > 0) & inside[:, None], other=0.0)
    if PDL:
        gdc_wait()
    if rank == 0:
        return
    values = narrow + (row * PARTS + part) * R + r
    acc = weight.to(tl.float32) * tl.load(values)[None, :]
    for first in range(RANKS, rank, RANKS):
        weight = tl.load(up + first, mask=inside[:, None], other=0.0)
        acc += weight.to(tl.float32) * tl.load(values + first)[None, :]
    into = product + row * N + begin + columns
    before = tl.load(into, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
    tl.store(into, (before + tl.sum(acc, axis=1)).to(product.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["ranks"])
def shrink_tiles_kernel(
    x, row_slots, downs, ranks, narrow, num_rows, num_slots,
    K: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, DOWN_STRIDE: tl.constexpr, RANK_STRIDE: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, SPLITS * PARTS * R / RANKS, LANES): each lane sees to every LANES-th slot, and each split to
    every SPLITS-th stretch of K."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    blocks: tl.constexpr = R // RANKS
    split, block = tl.program_id(1) % SPLITS, tl.program_id(1) // SPLITS
    part, first = block // blocks, block % blocks * RANKS
    slots = tl.load(row_slots + rows, mask=rows < num_rows, other=-1)
    rows = rows.to(tl.int64)[:, None]
    ranks_here = first + tl.arange(0, RANKS)[None, :]
    depth = tl.arange(0, DEPTH)
    for slot in range(tl.program_id(2), num_slots, LANES):
        mine = slots == slot
        rank = tl.load(ranks + slot * RANK_STRIDE)
        if (tl.max(mine.to(tl.int32), axis=0) > 0) & (first < rank):
            down = downs + tl.cast(slot, tl.int64) * DOWN_STRIDE + (part * R + ranks_here) * K
            acc = tl.zeros([ROWS, RANKS], tl.float32)
            for k in range(split * DEPTH, K, SPLITS * DEPTH):
                inside = k + depth < K
                at = x + rows * K + (k + depth)[None, :]
                value = tl.load(at, mask=mine[:, None] & inside[None, :], other=0.0)
                weight = tl.load(down + (k + depth)[:, None], mask=inside[:, None], other=0.0)
                acc = tl.dot(value, weight, acc, input_precision="ieee")
            into = narrow + ((split * num_rows + rows) * PARTS + part) * R + ranks_here
            tl.store(into, acc, mask=mine[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_slots"], do_not_specialize_on_alignment=["ranks"])
def expand_tiles_kernel(
    narrow, row_slots, ups, ranks, product, num_rows, num_slots,
    N: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
    UP_STRIDE: tl.constexpr, RANK_STRIDE: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, blocks of columns, LANES). A row has one slot, so no two programs add to one element."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.load(row_slots + rows, mask=rows < num_rows, other=-1)
    rows = rows.to(tl.int64)[:, None]
    part, begin, end = _columns_of(tl.program_id(1), FIRST, REST, COLUMNS)
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = begin + columns < end
    r = tl.arange(0, RANKS)
    for slot in range(tl.program_id(2), num_slots, LANES):
        mine = slots == slot
        rank = tl.load(ranks + slot * RANK_STRIDE)
        if (tl.max(mine.to(tl.int32), axis=0) > 0) & (rank > 0):
            up = ups + tl.cast(slot, tl.int64) * UP_STRIDE + begin * R + columns * R + r[:, None]
            acc = tl.zeros([ROWS, COLUMNS], tl.float32)
            for first in range(0, rank, RANKS):
                values = narrow + (rows * PARTS + part) * R + first + r[None, :]
                value = tl.load(values, mask=mine[:, None], other=0.0)
                for split in tl.static_range(1, SPLITS):
                    beyond = tl.cast(num_rows, tl.int64) * (split * PARTS * R)
                    value += tl.load(values + beyond, mask=mine[:, None], other=0.0)
                weight = tl.load(up + first, mask=inside, other=0.0)
                acc = tl.dot(value.to(weight.dtype), weight, acc, input_precision="ieee")
            into = product + rows * N + begin + columns
            mask = mine[:, None] & inside
            grown = tl.load(into, mask=mask, other=0.0).to(tl.float32) + acc
            tl.store(into, grown.to(product.dtype.element_ty), mask=mask)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803
"""Attention of packed, ragged chunks over cells, on the GPU: each chunk sees its sequence's cells and nothing else.

FlashAttention-2 (Dao 2023: one pass, running softmax, blocks that need no mask run without) in Triton, with keys and
values read through the sequence's cell list. A program takes a tile of one chunk's rows for one key/value head, where
all query heads that share it count as rows, so K and V are read once for them. Work follows what is attended: no mask
over the pool, no padding of short chunks to long ones. Decode steps have a kernel of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.attention import Span
from worker.cuda.cell_scales import WEIGHT_GAIN, row_constants
from worker.cuda.launch import GRID_LIMIT, of_grids
from worker.cuda.prefill_plan import LONG_ROWS, SHORT_ROWS, WIDE_ROWS, PrefillPlan, plan_prefill
from worker.cuda.write_cells import write_cells
from worker.kv_pool import KvPool

LOG2_E = tl.constexpr(1.4426950408889634)
_WARPS = {WIDE_ROWS: 16, LONG_ROWS: 8, SHORT_ROWS: 4}


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: PrefillPlan, out: Tensor, window: int | None = None
) -> None:
    """Write `out` [T, H, D] for `query` [T, H, D] over one layer's `keys`, `values` [num_cells + 1, J, D], H / J whole.

    A token at position p sees positions [max(0, p - window + 1), p] of its own sequence; their cells were written
    before, this step's own ones too. All of one dtype: bfloat16, float16 or float32 (then without tensor cores);
    float32 sums. `query` rows may be strided; heads and dimensions are contiguous. `keys` and `values` may also be
    scaled rows, as `KvPool.layer` gives them, or of another 16-bit dtype than `query`.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = num_heads // plan.shared_heads
    assert num_heads == num_kv_heads * plan.shared_heads
    rows = row_constants(keys, num_kv_heads, head_dim)
    scaled = rows["SCALED"]
    assert scaled or keys.shape[1:] == (num_kv_heads, head_dim)
    assert num_tokens == plan.num_tokens
    assert query.stride()[1:] == (head_dim, 1)
    assert out.is_contiguous()
    assert keys.is_contiguous()
    assert values.is_contiguous()
    exact = query.dtype == torch.float32
    # A wide tile's query and its cells in flight must fit into shared memory.
    wide = WIDE_ROWS if not (exact or scaled) and head_dim <= 128 else LONG_ROWS
    for tiles, block_rows, parts in _launches(plan, wide):
        _attend[(num_kv_heads, len(tiles) * parts)](
            query,
            keys,
            values,
            keys.view(torch.float32) if scaled else keys,
            values.view(torch.float32) if scaled else values,
            out,
            tiles,
            plan.chunks,
            plan.cells,
            query.stride(0),
            0 if window is None else window,
            LOG2_E.value / math.sqrt(head_dim),
            NUM_KV_HEADS=num_kv_heads,
            SHARED=plan.shared_heads,
            HEAD_DIM=head_dim,
            BLOCK_DIM=triton.next_power_of_2(head_dim),
            BLOCK_ROWS=block_rows,
            PARTS=parts,
            BLOCK_CELLS=32 if exact else 64,
            HAS_WINDOW=window is not None,
            PRECISION="ieee" if exact else "tf32",
            num_warps=_WARPS[block_rows],
            num_stages=2 if exact else 5,
            **rows,
        )


def _launches(plan: PrefillPlan, wide: int) -> Iterator[tuple[Tensor, int, int]]:
    """Tiles [n, 2] of one launch, as many as a grid takes; the rows of a program, and how many it takes for a tile.
    Programs of wide tiles have `wide` rows."""
    for all_tiles, tile_rows, block_rows in (
        (plan.wide_tiles, WIDE_ROWS, wide),
        (plan.long_tiles, LONG_ROWS, LONG_ROWS),
        (plan.short_tiles, SHORT_ROWS, SHORT_ROWS),
    ):
        parts = tile_rows // block_rows
        if len(all_tiles) > 0:
            for tiles in of_grids(all_tiles, GRID_LIMIT // parts):
                yield tiles, block_rows, parts


class CellAttention:
    """Keys, values and visibility of one forward on the GPU; see `worker.models.decoder.Attention`."""

    def __init__(self, pool: KvPool, spans: Sequence[Span], windows: Sequence[int | None], num_heads: int) -> None:
        """`spans` cover the forward's rows in order; `windows` has one entry a layer."""
        self._pool = pool
        self._windows = windows
        self._plan = plan_prefill(spans, num_heads // pool.keys.shape[2], pool.keys.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self._pool.layer(layer)
        write_cells(key, value, self._plan.new_cells, keys, values)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        attend(query, keys, values, self._plan, out, self._windows[layer])
        return out


@triton.jit(do_not_specialize=["window"])
def _attend(
    query, keys, values, key_scales, value_scales, out, tiles, chunks, cells, query_stride, window, scale,
    NUM_KV_HEADS: tl.constexpr, SHARED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK_CELLS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, CELL: tl.constexpr, SCALED: tl.constexpr, SCALES_AT: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One of PARTS parts of a tile of rows, and one key/value head. Row r of a chunk is token r // SHARED, head
    r % SHARED of the group. A tile of chunk -1 is none."""
    kv_head = tl.program_id(0)
    tile = tiles + 2 * (tl.program_id(1) // PARTS)
    index, first_row = tl.load(tile), tl.load(tile + 1) + tl.program_id(1) % PARTS * BLOCK_ROWS
    if index < 0:
        return
    chunk = chunks + 4 * index
    first_token, length, start, first_cell = (
        tl.load(chunk),
        tl.load(chunk + 1),
        tl.load(chunk + 2),
        tl.load(chunk + 3),
    )
    if first_row >= length * SHARED:
        return
    row = first_row + tl.arange(0, BLOCK_ROWS)
    token = row // SHARED
    position = start + token
    dim = tl.arange(0, BLOCK_DIM)
    is_row = (token < length)[:, None] & (dim < HEAD_DIM)[None, :]
    packed = (first_token + token).to(tl.int64)[:, None]
    column = ((kv_head * SHARED + row % SHARED) * HEAD_DIM)[:, None] + dim[None, :]
    q = tl.load(query + packed * query_stride + column, mask=is_row, other=0.0)
    if SCALED and PRECISION == "tf32":
        q = q.to(tl.float16)  # which e4m3 becomes in one instruction
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    key_scales += SCALES_AT + kv_head
    value_scales += SCALES_AT + kv_head
    cells += first_cell

    lowest = start + first_row // SHARED
    highest = start + tl.minimum((first_row + BLOCK_ROWS - 1) // SHARED, length - 1)
    begin, seen_by_all, end = 0, 0, highest + 1
    if HAS_WINDOW:
        begin = tl.maximum(0, lowest - window + 1) // BLOCK_CELLS * BLOCK_CELLS
        seen_by_all = tl.minimum(tl.cdiv(tl.maximum(0, highest - window + 1), BLOCK_CELLS) * BLOCK_CELLS, end)
    diagonal = tl.maximum((lowest + 1) // BLOCK_CELLS * BLOCK_CELLS, seen_by_all)

    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((BLOCK_ROWS,), tl.float32)
    mixed = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    state = (top, mass, mixed)
    if HAS_WINDOW:
        state = _mix(
            q, state, keys, values, key_scales, value_scales, cells, begin, seen_by_all, end, position, window, scale,
            CELL, SCALE_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_CELLS, True, HAS_WINDOW, SCALED, PRECISION,
        )  # fmt: skip
    state = _mix(
        q, state, keys, values, key_scales, value_scales, cells, seen_by_all, diagonal, end, position, window, scale,
        CELL, SCALE_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_CELLS, False, HAS_WINDOW, SCALED, PRECISION,
    )  # fmt: skip
    state = _mix(
        q, state, keys, values, key_scales, value_scales, cells, diagonal, end, end, position, window, scale,
        CELL, SCALE_STRIDE, HEAD_DIM, BLOCK_DIM, BLOCK_CELLS, True, HAS_WINDOW, SCALED, PRECISION,
    )  # fmt: skip
    top, mass, mixed = state
    if SCALED:
        mass *= WEIGHT_GAIN
    mixed = mixed / mass[:, None]
    out_stride = NUM_KV_HEADS * SHARED * HEAD_DIM
    tl.store(out + packed * out_stride + column, mixed.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _mix(
    q, state, keys, values, key_scales, value_scales, cells, begin, stop, end, position, window, scale,
    CELL: tl.constexpr, SCALE_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
    BLOCK_CELLS: tl.constexpr, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Go on with the running softmax over positions [begin, stop); without MASKED every row sees all of them."""
    top, mass, mixed = state
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = (dim < HEAD_DIM)[None, :]
    for first in range(begin, stop, BLOCK_CELLS):
        seen = first + tl.arange(0, BLOCK_CELLS)
        if MASKED:
            cell = tl.load(cells + seen, mask=seen < end, other=0).to(tl.int64)
        else:
            cell = tl.load(cells + seen).to(tl.int64)
        offset = (cell * CELL)[:, None] + dim[None, :]
        if MASKED:
            # What lies beyond the end is another's, and may be NaN, which no weight of zero takes away.
            is_there = is_dim & (seen < end)[:, None]
            k = tl.load(keys + offset, mask=is_there, other=0.0)
            v = tl.load(values + offset, mask=is_there, other=0.0)
        elif HEAD_DIM == BLOCK_DIM:
            k = tl.load(keys + offset)
            v = tl.load(values + offset)
        else:
            k = tl.load(keys + offset, mask=is_dim, other=0.0)
            v = tl.load(values + offset, mask=is_dim, other=0.0)
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale
        if SCALED:
            if MASKED:  # beyond the end a scale is another's, too
                key_scale = tl.load(key_scales + cell * SCALE_STRIDE, mask=seen < end, other=0.0)
                value_scale = tl.load(value_scales + cell * SCALE_STRIDE, mask=seen < end, other=0.0)
            else:
                key_scale = tl.load(key_scales + cell * SCALE_STRIDE)
                value_scale = tl.load(value_scales + cell * SCALE_STRIDE)
            score *= key_scale[None, :]
        if MASKED:
            is_seen = seen[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen &= seen[None, :] > position[:, None] - window
            score = tl.where(is_seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # A row that has seen nothing yet (its window begins later) has no top to subtract.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - base[:, None])
        decay = tl.exp2(top - base)
        mass = mass * decay + tl.sum(weight, axis=1)
        if SCALED:
            weight *= (value_scale * WEIGHT_GAIN)[None, :]
        mixed = tl.dot(weight.to(q.dtype), v.to(q.dtype), mixed * decay[:, None], input_precision=PRECISION)
        top = new_top
    return top, mass, mixed

"""Matrix products of 8 to a few hundred rows on the tensor cores, cut along K so that every multiprocessor has work.

Partial products stay in fp32, `[splits, rows, N]`, and are summed by whichever kernel reads them next (add-and-norm,
or attention's load of q, k and v): no reduction kernel, no atomics. Splitting K for occupancy follows Stream-K's
observation (Osama et al. 2023) in its simplest, fixed form. For wide steps of large models the vendor library is
faster: `decode_plan` chooses.

Of e4m3 (SCALED), sums are multiplied by the scale of x's row and that of the matrix' (`worker.cuda.fp8`). The tensor
cores add such products with fewer bits than float32's, as the vendor's fast accumulation does.

Shapes must divide (N by COLUMNS, K by SPLITS * DEPTH); row buffers are padded to whole tiles, so loads need no mask.
Launched as programmatic dependents, every kernel waits before it reads what another kernel wrote.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _accumulate(
    x, w, rows, columns, start, count: tl.constexpr,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """x [rows, K] times w [columns, K] transposed over K in [start, start + count): [COLUMNS, ROWS] if SWAP (weights
    are then the 64-row operand of the tensor cores, which suits few rows), else [ROWS, COLUMNS]."""
    depth = tl.arange(0, DEPTH)
    if SWAP:
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for k in range(0, count, DEPTH):
            w_tile = tl.load(w + columns[:, None] * K + (start + k + depth)[None, :])
            x_tile = tl.load(x + rows[None, :] * K + (start + k + depth)[:, None])
            acc = tl.dot(w_tile, x_tile, acc, input_precision="ieee")
    else:
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, count, DEPTH):
            x_tile = tl.load(x + rows[:, None] * K + (start + k + depth)[None, :])
            w_tile = tl.load(w + columns[None, :] * K + (start + k + depth)[:, None])
            acc = tl.dot(x_tile, w_tile, acc, input_precision="ieee")
    return acc


@triton.jit
def ask_ahead(w, columns, start, K: tl.constexpr, AHEAD: tl.constexpr):
    """Has AHEAD numbers of each column's weights brought into the second-level cache, a line at a time. They do not
    depend on any kernel, so that memory need not idle while one waits."""
    LINE: tl.constexpr = 128 * 8 // w.dtype.element_ty.primitive_bitwidth
    at = w + columns[:, None] * K + (start + tl.arange(0, AHEAD // LINE) * LINE)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _scaled(acc, x_scales, w_scales, rows, columns, SWAP: tl.constexpr):
    """Sums of codes to what they stand for."""
    of_rows, of_columns = tl.load(x_scales + rows), tl.load(w_scales + columns)
    if SWAP:
        acc *= of_rows[None, :] * of_columns[:, None]
    else:
        acc *= of_rows[:, None] * of_columns[None, :]
    return acc


@triton.jit(do_not_specialize=["num_rows", "split_stride"])
def split_linear_kernel(
    x, w, x_scales, w_scales, out, num_rows, split_stride,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, SWAP: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out fp32 [SPLITS, rows, N], `split_stride` elements from one split to the next: partial sums of x @ w.T. Scales
    fp32 [padded rows] and [N], read if SCALED."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if PDL and AHEAD > 0:
        ask_ahead(w, columns, split * (K // SPLITS), K, AHEAD)
    if PDL:
        gdc_wait()
    acc = _accumulate(x, w, rows, columns, split * (K // SPLITS), K // SPLITS, K, ROWS, COLUMNS, DEPTH, SWAP)
    if PDL and not EARLY:
        gdc_launch_dependents()
    if SCALED:
        acc = _scaled(acc, x_scales, w_scales, rows, columns, SWAP)
    at = out + split * split_stride.to(tl.int64)
    if SWAP:
        tl.store(at + rows[None, :] * N + columns[:, None], acc, mask=(rows < num_rows)[None, :])
    else:
        tl.store(at + rows[:, None] * N + columns[None, :], acc, mask=(rows < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_kernel(
    x, w, x_scales, w_scales, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SWAP: tl.constexpr, SCALED: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = silu(x @ gate.T) * (x @ up.T); w is [2 N, K], the gate's rows first. Scales as those of
    `split_linear_kernel`."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    depth = tl.arange(0, DEPTH)
    if PDL and AHEAD > 0:
        ask_ahead(w, columns, 0, K, AHEAD)
        ask_ahead(w, columns + N, 0, K, AHEAD)
    if PDL:
        gdc_wait()
    if SWAP:
        gate = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
        for k in range(0, K, DEPTH):
            gate_tile = tl.load(w + columns[:, None] * K + (k + depth)[None, :])
            up_tile = tl.load(w + (columns + N)[:, None] * K + (k + depth)[None, :])
            x_tile = tl.load(x + rows[None, :] * K + (k + depth)[:, None])
            gate = tl.dot(gate_tile, x_tile, gate, input_precision="ieee")
            up = tl.dot(up_tile, x_tile, up, input_precision="ieee")
    else:
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for k in range(0, K, DEPTH):
            x_tile = tl.load(x + rows[:, None] * K + (k + depth)[None, :])
            gate_tile = tl.load(w + columns[None, :] * K + (k + depth)[:, None])
            up_tile = tl.load(w + (columns + N)[None, :] * K + (k + depth)[:, None])
            gate = tl.dot(x_tile, gate_tile, gate, input_precision="ieee")
            up = tl.dot(x_tile, up_tile, up, input_precision="ieee")
    if PDL and not EARLY:
        gdc_launch_dependents()
    if SCALED:
        gate = _scaled(gate, x_scales, w_scales, rows, columns, SWAP)
        up = _scaled(up, x_scales, w_scales, rows, columns + N, SWAP)
    active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    if SWAP:
        tl.store(out + rows[None, :] * N + columns[:, None], active, mask=(rows < num_rows)[None, :])
    else:
        tl.store(out + rows[:, None] * N + columns[None, :], active, mask=(rows < num_rows)[:, None])


@triton.jit
def leave_best(
    rounded, rows, columns, part, logits, best, best_id, num_rows, num_parts,
    N: tl.constexpr, STORE_LOGITS: tl.constexpr,
):  # fmt: skip
    """What an LM head's program leaves of its logits, `rounded` [ROWS, COLUMNS], part `part` of each row's: see
    `head_kernel`."""
    inside = columns < N
    mine = rows < num_rows
    if STORE_LOGITS:
        at = rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(logits + at, rounded, mask=mine[:, None] & inside[None, :])
    value = rounded.to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    value = tl.where(inside[None, :], value, float("-inf"))
    top = tl.max(value, axis=1)
    top_id = tl.min(tl.where(value == top[:, None], columns[None, :], N), axis=1)
    tl.store(best + rows * num_parts + part, top, mask=mine)
    tl.store(best_id + rows * num_parts + part, top_id, mask=mine)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def head_kernel(
    x, w, logits, best, best_id, num_rows, num_parts,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    SWAP: tl.constexpr, STORE_LOGITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The LM head: each part's largest logit and its lowest token id into best, best_id [rows, num_parts], and the
    logits [rows, N] themselves where asked for. A NaN counts as +inf, so that it shows. Programs of one part lie next
    to each other in the grid, so that a part is read once, however many tiles of rows there are."""
    part = tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_wait()
    acc = _accumulate(x, w, rows, tl.minimum(columns, N - 1), 0, K, K, ROWS, COLUMNS, DEPTH, SWAP)
    if PDL:
        gdc_launch_dependents()
    if SWAP:
        acc = tl.trans(acc)
    rounded = acc.to(w.dtype.element_ty)
    leave_best(rounded, rows, columns, part, logits, best, best_id, num_rows, num_parts, N, STORE_LOGITS)

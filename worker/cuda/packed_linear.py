"""Products of few rows with matrices of four or eight bits, on the tensor cores: `worker.cuda.linear` for packed ones.

The codes become the tensor cores' numbers in registers, and stay there: weights are the 64-row operand whatever the
number of rows, and lie in memory so that every thread loads what is its own of that operand (`packed`). Of eight bits
a code is exact in bfloat16 and the column's scale comes last; of four bits the value is rounded to it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.linear import ask_ahead
from worker.cuda.packed_codes import LOAD_WORDS, finished, in_order


@triton.jit
def packed_weights(
    x, codes, scales, columns, start, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, DEPTH] of x's type from column `start` of K on; of eight bits they lack the columns' scales."""
    WORDS: tl.constexpr = DEPTH * BITS // 32
    words = tl.load(codes + columns[:, None] * (K * BITS // 32) + (start * BITS // 32 + tl.arange(0, WORDS))[None, :])
    if BITS == 4:
        LOADS: tl.constexpr = WORDS // LOAD_WORDS
        loaded = tl.load(scales + columns[:, None] * (K // 32) + (start // 32 + tl.arange(0, LOADS))[None, :])
        of_words = tl.reshape(tl.broadcast_to(loaded[:, :, None], (COLUMNS, LOADS, LOAD_WORDS)), (COLUMNS, WORDS))
    else:
        of_words = words
    return in_order(words, of_words, COLUMNS, WORDS, BITS, x.dtype.element_ty, NATIVE)


@triton.jit
def packed_rows(x, rows, start, K: tl.constexpr, DEPTH: tl.constexpr):
    """x [rows, K] transposed, K in [start, start + DEPTH)."""
    return tl.load(x + rows[None, :] * K + (start + tl.arange(0, DEPTH))[:, None])


@triton.jit(do_not_specialize=["num_rows", "split_stride"])
def packed_split_kernel(
    x, codes, scales, out, num_rows, split_stride,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out fp32 [SPLITS, rows, N], `split_stride` elements from one split to the next: partial sums of x @ w.T."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if PDL and AHEAD > 0:
        ask_ahead(codes, columns, split * (K // SPLITS) * BITS // 32, K * BITS // 32, AHEAD * BITS // 32)
    if BITS == 8:
        lacking = tl.load(scales + columns)[:, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    first = split * (K // SPLITS)
    for k in range(0, K // SPLITS, DEPTH):
        weights = packed_weights(x, codes, scales, columns, first + k, K, COLUMNS, DEPTH, BITS, NATIVE)
        acc = tl.dot(weights, packed_rows(x, rows, first + k, K, DEPTH), acc, input_precision="ieee")
        acc = finished(acc, NATIVE)
    if PDL and not EARLY:
        gdc_launch_dependents()
    if BITS == 8:
        acc *= lacking
    at = out + split * split_stride.to(tl.int64) + rows[None, :] * N + columns[:, None]
    tl.store(at, acc, mask=(rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def packed_gate_up_kernel(
    x, codes, scales, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BITS: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = silu(x @ gate.T) * (x @ up.T); the matrix is [2 N, K], the gate's rows first. Eight of gate and
    eight of up take turns in the operand, so that a thread gets both of a column."""
    if PDL and EARLY:
        gdc_launch_dependents()
    operand = tl.arange(0, 2 * COLUMNS)
    both = tl.program_id(0) * COLUMNS + operand // 16 * 8 + operand % 8 + operand // 8 % 2 * N
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if PDL and AHEAD > 0:
        ask_ahead(codes, both, 0, K * BITS // 32, AHEAD * BITS // 32)
    if BITS == 8:
        lacking = tl.load(scales + both)[:, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros([2 * COLUMNS, ROWS], tl.float32)
    for k in range(0, K, DEPTH):
        weights = packed_weights(x, codes, scales, both, k, K, 2 * COLUMNS, DEPTH, BITS, NATIVE)
        acc = tl.dot(weights, packed_rows(x, rows, k, K, DEPTH), acc, input_precision="ieee")
        acc = finished(acc, NATIVE)
    if PDL and not EARLY:
        gdc_launch_dependents()
    if BITS == 8:
        acc *= lacking
    turns = tl.permute(tl.reshape(acc, (COLUMNS // 8, 2, 8, ROWS)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(turns, (COLUMNS, ROWS, 2)))
    active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + rows[None, :] * N + columns[:, None], active, mask=(rows < num_rows)[None, :])


@triton.jit
def values_kernel(codes, scales, out, K: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """out [N, K]: a packed matrix's values, for products of many rows by the vendor's library."""
    row = tl.program_id(0).to(tl.int64)
    row_words: tl.constexpr = K * BITS // 32
    CODES: tl.constexpr = 32 // BITS
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    words = tl.load(codes + row * row_words + word, mask=word < row_words, other=0)
    if BITS == 4:
        of_words = tl.load(scales + row * (K // 32) + word // LOAD_WORDS, mask=word < row_words, other=0)
    else:
        of_words = words
    values = in_order(words[None, :], of_words[None, :], 1, WORDS, BITS, out.dtype.element_ty, NATIVE)
    if BITS == 8:
        values = (values.to(tl.float32) * tl.load(scales + row)).to(out.dtype.element_ty)
    column = tl.program_id(1) * (WORDS * CODES) + tl.arange(0, WORDS * CODES)
    tl.store(out + row * K + column[None, :], values, mask=(column < K)[None, :])

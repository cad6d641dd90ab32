"""Products of few rows with matrices of four or eight bits, on the tensor cores: `worker.cuda.linear` for packed ones.

The codes become the tensor cores' numbers in registers: weights are the 64-row operand whatever the number of rows.
Of eight bits a code is exact in bfloat16 and the column's scale comes last; of four bits the value is rounded to it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.packed_codes import (
    BYTE_OFFSET,
    LOAD_WORDS,
    NIBBLE_OFFSET,
    bytes_as_floats,
    nibbles_as_floats,
    scale_and_least,
)


@triton.jit
def _accumulate(
    acc, x, codes, scales, rows, columns, start,
    K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """acc [COLUMNS, ROWS] + w [columns, K] times x [rows, K] transposed, over K in [start, start + DEPTH). A product
    for each place of a code in its word."""
    WORDS: tl.constexpr = DEPTH * BITS // 32
    word = tl.arange(0, WORDS)
    loaded = tl.load(codes + columns[:, None] * (K * BITS // 32) + (start * BITS // 32 + word)[None, :])
    depth = start + word // LOAD_WORDS * (LOAD_WORDS * 32 // BITS) + word % LOAD_WORDS
    x_at = x + rows[None, :] * K + depth[:, None]
    if BITS == 8:
        values = bytes_as_floats(loaded, NATIVE)
        for place in tl.static_range(4):
            weights = (values[place] - BYTE_OFFSET).to(x.dtype.element_ty)
            acc = tl.dot(weights, tl.load(x_at + place * LOAD_WORDS), acc, input_precision="ieee")
    else:
        at = scales + columns[:, None] * (K // 32) + (start // 32 + word // LOAD_WORDS)[None, :]
        scale, least = scale_and_least(tl.load(at))
        base = least - NIBBLE_OFFSET * scale
        values = nibbles_as_floats(loaded, NATIVE)
        for place in tl.static_range(8):
            weights = (values[place] * scale + base).to(x.dtype.element_ty)
            acc = tl.dot(weights, tl.load(x_at + place * LOAD_WORDS), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_rows", "split_stride"])
def packed_split_kernel(
    x, codes, scales, out, num_rows, split_stride,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out fp32 [SPLITS, rows, N], `split_stride` elements from one split to the next: partial sums of x @ w.T."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_wait()
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    first = split * (K // SPLITS)
    for k in range(0, K // SPLITS, DEPTH):
        acc = _accumulate(acc, x, codes, scales, rows, columns, first + k, K, DEPTH, BITS, NATIVE)
    if PDL:
        gdc_launch_dependents()
    if BITS == 8:
        acc *= tl.load(scales + columns)[:, None]
    at = out + split * split_stride.to(tl.int64) + rows[None, :] * N + columns[:, None]
    tl.store(at, acc, mask=(rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def packed_gate_up_kernel(
    x, codes, scales, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    BITS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = silu(x @ gate.T) * (x @ up.T); the matrix is [2 N, K], the gate's rows first."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if PDL:
        gdc_wait()
    gate = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in range(0, K, DEPTH):
        gate = _accumulate(gate, x, codes, scales, rows, columns, k, K, DEPTH, BITS, NATIVE)
        up = _accumulate(up, x, codes, scales, rows, columns + N, k, K, DEPTH, BITS, NATIVE)
    if PDL:
        gdc_launch_dependents()
    if BITS == 8:
        gate *= tl.load(scales + columns)[:, None]
        up *= tl.load(scales + columns + N)[:, None]
    active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + rows[None, :] * N + columns[:, None], active, mask=(rows < num_rows)[None, :])


@triton.jit
def values_kernel(codes, scales, out, K: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """out [N, K]: a packed matrix's values, for products of many rows by the vendor's library."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    row_words: tl.constexpr = K * BITS // 32
    inside = word < row_words
    loaded = tl.load(codes + row * row_words + word, mask=inside, other=0)
    at = out + row * K + word // LOAD_WORDS * (LOAD_WORDS * 32 // BITS) + word % LOAD_WORDS
    if BITS == 8:
        scale = tl.load(scales + row)
        values = bytes_as_floats(loaded, NATIVE)
        for place in tl.static_range(4):
            value = (values[place] - BYTE_OFFSET) * scale
            tl.store(at + place * LOAD_WORDS, value.to(out.dtype.element_ty), mask=inside)
    else:
        words = tl.load(scales + row * (K // 32) + word // LOAD_WORDS, mask=inside, other=0)
        scale, least = scale_and_least(words)
        values = nibbles_as_floats(loaded, NATIVE)
        for place in tl.static_range(8):
            value = (values[place] - NIBBLE_OFFSET) * scale + least
            tl.store(at + place * LOAD_WORDS, value.to(out.dtype.element_ty), mask=inside)

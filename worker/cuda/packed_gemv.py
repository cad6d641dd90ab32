"""Matrices of four or eight bits times one row: the linears of a decode step of width 1.

As `worker.cuda.gemv`, whose launches, norms and sums these kernels share; what differs is how cheap a weight must be.
At half or a quarter of the bytes there is no time to turn every code into a float, so the sums are of integers: what a
thread's codes meet of x becomes integers of 16 bits, with a scale of their own, which is finer than x was rounded to;
four-way products of bytes then take one code and a half an instruction, exactly. (llama.cpp multiplies codes by an x of
8 bits in this way.) All columns of a program share what is made of x. How codes lie is `worker.cuda.packed`'s business.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.packed_codes import CODE_OFFSET, LOAD_WORDS, as_bytes, byte_dots, nibble_dots, scale_and_base

COLUMNS = tl.constexpr(8)
# The largest of a load's values becomes this; so that no other rounds to more than 2^15 - 1.
_LARGEST = tl.constexpr(32767.0)


@triton.jit
def _each_load(values, WORDS: tl.constexpr):
    """What one thread loaded at once, a row each: [WORDS / 4, 4]."""
    return tl.reshape(values, (WORDS // LOAD_WORDS, LOAD_WORDS))


@triton.jit
def _neighbours(x, start, PLACE: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """float32 [WORDS] twice: what a word's low and its high half meet of x in their place of that number."""
    word = tl.arange(0, WORDS)
    pairs = start // 2 + word // LOAD_WORDS * (LOAD_WORDS * 16 // BITS) + PLACE * 4 + word % LOAD_WORDS
    if x.dtype.element_ty == tl.bfloat16:  # both at once
        pair = tl.load(x.to(tl.pointer_type(tl.int32)) + pairs)
        low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = tl.load(x + pairs * 2).to(tl.float32), tl.load(x + pairs * 2 + 1).to(tl.float32)
    return low, high


@triton.jit
def _part_of_x(x, start, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """What columns share of x from `start` on: its integers' low and high bytes, as they meet the codes in even and in
    odd places (of eight bits, the same twice); for each load, what one of these integers is worth, and the sum of x."""
    WORDS: tl.constexpr = DEPTH * BITS // 32
    x0, y0 = _neighbours(x, start, 0, WORDS, BITS)
    x1, y1 = _neighbours(x, start, 1, WORDS, BITS)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(y0)), tl.maximum(tl.abs(x1), tl.abs(y1)))
    total = (x0 + y0) + (x1 + y1)
    if BITS == 4:
        x2, y2 = _neighbours(x, start, 2, WORDS, BITS)
        x3, y3 = _neighbours(x, start, 3, WORDS, BITS)
        others = tl.maximum(tl.maximum(tl.abs(x2), tl.abs(y2)), tl.maximum(tl.abs(x3), tl.abs(y3)))
        largest = tl.maximum(largest, others)
        total += (x2 + y2) + (x3 + y3)
    # Integers know no NaN: where x has one, what they are worth is infinite, so that it shows in every product.
    largest = tl.where(total != total, float("inf"), largest)
    most = tl.maximum(tl.max(_each_load(largest, WORDS), axis=1), 1e-30)
    factor = _LARGEST / most
    spread = tl.reshape(tl.broadcast_to(factor[:, None], (WORDS // LOAD_WORDS, LOAD_WORDS)), (WORDS,))
    if BITS == 4:
        low_even, high_even = as_bytes(x0, x2, y0, y2, spread, NATIVE)
        low_odd, high_odd = as_bytes(x1, x3, y1, y3, spread, NATIVE)
    else:
        low_even, high_even = as_bytes(x0, x1, y0, y1, spread, NATIVE)
        low_odd, high_odd = low_even, high_even
    total = tl.sum(_each_load(total, WORDS), axis=1)
    return low_even, high_even, low_odd, high_odd, most / _LARGEST, total


@triton.jit
def _codes(codes, column, start, K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr):
    return tl.load(codes + column * (K * BITS // 32) + start * BITS // 32 + tl.arange(0, DEPTH * BITS // 32))


@triton.jit
def _dots(
    part, words, scales, column, start,
    K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """A column's products with a part of x, summed over each load: [DEPTH * BITS / 128]. Of eight bits they lack the
    column's scale."""
    low_even, high_even, low_odd, high_odd, worth, total = part
    WORDS: tl.constexpr = DEPTH * BITS // 32
    if BITS == 4:
        dots = nibble_dots(words, low_even, high_even, low_odd, high_odd, NATIVE)
        dots = tl.sum(_each_load(dots, WORDS), axis=1).to(tl.float32) * worth
        scale, base = scale_and_base(tl.load(scales + column * (K // 32) + start // 32 + tl.arange(0, DEPTH // 32)))
        dots = dots * scale + total * (base + CODE_OFFSET * scale)
    else:
        dots = byte_dots(words, low_even, high_even, NATIVE)
        dots = tl.sum(_each_load(dots, WORDS), axis=1).to(tl.float32) * worth
    return dots


@triton.jit
def _four_dots(
    sums, part, words, scales, columns, start,
    K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """`sums` of four columns and what they have from `start` on."""
    return (
        sums[0] + _dots(part, words[0], scales, columns[0], start, K, DEPTH, BITS, NATIVE),
        sums[1] + _dots(part, words[1], scales, columns[1], start, K, DEPTH, BITS, NATIVE),
        sums[2] + _dots(part, words[2], scales, columns[2], start, K, DEPTH, BITS, NATIVE),
        sums[3] + _dots(part, words[3], scales, columns[3], start, K, DEPTH, BITS, NATIVE),
    )


@triton.jit
def _four_codes(codes, columns, start, K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr):
    return (
        _codes(codes, columns[0], start, K, DEPTH, BITS),
        _codes(codes, columns[1], start, K, DEPTH, BITS),
        _codes(codes, columns[2], start, K, DEPTH, BITS),
        _codes(codes, columns[3], start, K, DEPTH, BITS),
    )


@triton.jit
def _four_from(column):
    return column, column + 1, column + 2, column + 3


@triton.jit
def _all_sums(a, b):
    """[8]: the sums over all threads of four columns and four others, in order. One exchange between warps for all."""
    even = tl.join(tl.join(a[0], b[0]), tl.join(a[2], b[2]))
    odd = tl.join(tl.join(a[1], b[1]), tl.join(a[3], b[3]))
    return tl.reshape(tl.sum(tl.join(even, odd), axis=0), (8,))


@triton.jit
def _eight(
    x, first, second, codes, scales, columns, others,
    K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """[8]: x [K] times four columns and four others, of which the codes `first` and `second` of the first DEPTH were
    loaded already. Of eight bits they lack the columns' scales."""
    part = _part_of_x(x, 0, DEPTH, BITS, NATIVE)
    none = tl.zeros([DEPTH * BITS // 128], tl.float32)
    zeros = (none, none, none, none)
    a = _four_dots(zeros, part, first, scales, columns, 0, K, DEPTH, BITS, NATIVE)
    b = _four_dots(zeros, part, second, scales, others, 0, K, DEPTH, BITS, NATIVE)
    for start in tl.static_range(DEPTH, K, DEPTH):
        part = _part_of_x(x, start, DEPTH, BITS, NATIVE)
        words = _four_codes(codes, columns, start, K, DEPTH, BITS)
        a = _four_dots(a, part, words, scales, columns, start, K, DEPTH, BITS, NATIVE)
        words = _four_codes(codes, others, start, K, DEPTH, BITS)
        b = _four_dots(b, part, words, scales, others, start, K, DEPTH, BITS, NATIVE)
    return _all_sums(a, b)


@triton.jit
def _root_mean_square(sums, num_sums, eps, K: tl.constexpr, MAX_SUMS: tl.constexpr):
    """The reciprocal one, from a row's partial sums of squares."""
    parts = tl.arange(0, MAX_SUMS)
    squares = tl.load(sums + parts, mask=parts < num_sums, other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit(do_not_specialize=["num_sums"])
def packed_normed_gemv_kernel(
    x, sums, codes, scales, out, num_sums, eps,
    K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, MAX_SUMS: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] fp32 = norm(x) @ w.T, where x is the scaled residual that the kernel before wrote."""
    column = tl.program_id(0) * COLUMNS
    columns, others = _four_from(column), _four_from(column + 4)
    first = _four_codes(codes, columns, 0, K, DEPTH, BITS)
    second = _four_codes(codes, others, 0, K, DEPTH, BITS)
    if PDL:
        gdc_wait()
    norm = _root_mean_square(sums, num_sums, eps, K, MAX_SUMS)
    result = _eight(x, first, second, codes, scales, columns, others, K, DEPTH, BITS, NATIVE)
    if PDL:
        gdc_launch_dependents()
    at = column + tl.arange(0, COLUMNS)
    tl.store(out + at, result * norm * _column_scales(scales, at, BITS))


@triton.jit(do_not_specialize=["num_sums"])
def packed_gate_up_gemv_kernel(
    x, sums, codes, scales, out, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, MAX_SUMS: tl.constexpr,
    NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] = silu(gate) * up of norm(x); the matrix is [2 N, K], the gate's rows first. Four of each a program."""
    column = tl.program_id(0) * 4
    columns, others = _four_from(column), _four_from(column + N)
    first = _four_codes(codes, columns, 0, K, DEPTH, BITS)
    second = _four_codes(codes, others, 0, K, DEPTH, BITS)
    if PDL:
        gdc_wait()
    norm = _root_mean_square(sums, num_sums, eps, K, MAX_SUMS)
    result = _eight(x, first, second, codes, scales, columns, others, K, DEPTH, BITS, NATIVE)
    if PDL:
        gdc_launch_dependents()
    at = column + tl.arange(0, 4)
    gate, up = tl.split(tl.trans(tl.reshape(result, (2, 4))))
    gate *= norm * _column_scales(scales, at, BITS)
    up *= norm * _column_scales(scales, at + N, BITS)
    tl.store(out + at, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty))


@triton.jit
def packed_residual_gemv_kernel(
    x, codes, scales, residual, norm_weight, scaled, sums,
    K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [N] += x @ w.T in place; scaled = residual * norm_weight; sums gets one partial sum of squares a
    program, at the program's index."""
    column = tl.program_id(0) * COLUMNS
    columns, others = _four_from(column), _four_from(column + 4)
    first = _four_codes(codes, columns, 0, K, DEPTH, BITS)
    second = _four_codes(codes, others, 0, K, DEPTH, BITS)
    if PDL:
        gdc_wait()
    at = column + tl.arange(0, COLUMNS)
    before = tl.load(residual + at).to(tl.float32)
    result = _eight(x, first, second, codes, scales, columns, others, K, DEPTH, BITS, NATIVE)
    if PDL:
        gdc_launch_dependents()
    after = (before + result * _column_scales(scales, at, BITS)).to(residual.dtype.element_ty)
    tl.store(residual + at, after)
    after = after.to(tl.float32)
    norm = tl.load(norm_weight + at).to(tl.float32)
    tl.store(scaled + at, (after * norm).to(scaled.dtype.element_ty))
    tl.store(sums + tl.program_id(0), tl.sum(after * after, axis=0))


@triton.jit
def _column_scales(scales, columns, BITS: tl.constexpr):
    """What sums of these columns lack: of four bits nothing."""
    return tl.load(scales + columns) if BITS == 8 else 1.0

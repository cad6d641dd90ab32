"""Matrices of four or eight bits times one row: the linears of a decode step of width 1.

As `worker.cuda.gemv`, whose launches, norms and sums these kernels share; what differs is how cheap a weight must be.
At half or a quarter of the bytes there is no time to turn every code into a float, so the sums are of integers: what a
thread's codes meet of x becomes integers of 16 bits, with a scale of their own, which is finer than x was rounded to;
four-way products of bytes then take two codes an instruction, exactly. (llama.cpp multiplies codes by an x of 8 bits in
this way.) All columns of a program share what is made of x, which costs as much as several of them. How codes lie is
`worker.cuda.packed`'s business.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment,var-annotated"
# ruff: noqa: N803, N806, RUF005, SIM108

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.gemv import norm_factor, partial_squares
from worker.cuda.packed_codes import CODE_OFFSET, LOAD_WORDS, as_bytes, byte_dots, nibble_dots, scale_and_base

# The largest of a load's values becomes this; so that no other rounds to more than 2^15 - 1.
_LARGEST = tl.constexpr(32767.0)
_WORTH = tl.constexpr(1 / 32767)


@triton.jit
def _quarters(values, LOADS: tl.constexpr):
    """Four tensors [LOADS]: what belongs to the first word of each load, to the second, and so on."""
    first, second = tl.split(tl.reshape(values, (LOADS, 2, 2)))
    w0, w2 = tl.split(first)
    w1, w3 = tl.split(second)
    return w0, w1, w2, w3


@triton.jit
def _neighbours(x, START: tl.constexpr, PLACE: tl.constexpr, K: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr):
    """float32 [WORDS] twice: what a word's low and its high half meet of x in their place of that number."""
    word = tl.arange(0, WORDS)
    pairs = START // 2 + word // LOAD_WORDS * (LOAD_WORDS * 16 // BITS) + PLACE * 4 + word % LOAD_WORDS
    if x.dtype.element_ty == tl.bfloat16:  # both at once
        pair = tl.load(x.to(tl.pointer_type(tl.int32)) + pairs, mask=pairs < K // 2, other=0)
        low, high = (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)
    else:
        low = tl.load(x + pairs * 2, mask=pairs < K // 2, other=0.0).to(tl.float32)
        high = tl.load(x + pairs * 2 + 1, mask=pairs < K // 2, other=0.0).to(tl.float32)
    return low, high


@triton.jit
def _part_of_x(x, START: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """What columns share of x from START on, eighteen tensors [DEPTH * BITS / 128]: of its integers the low and then
    the high bytes, a quarter each, as they meet the codes in even and then in odd places (of eight bits, the same
    twice); for each load, what one is worth in the sums of products that are made of them, and the sum of x."""
    WORDS: tl.constexpr = DEPTH * BITS // 32
    LOADS: tl.constexpr = WORDS // LOAD_WORDS
    x0, y0 = _neighbours(x, START, 0, K, WORDS, BITS)
    x1, y1 = _neighbours(x, START, 1, K, WORDS, BITS)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(y0)), tl.maximum(tl.abs(x1), tl.abs(y1)))
    total = (x0 + y0) + (x1 + y1)
    if BITS == 4:
        x2, y2 = _neighbours(x, START, 2, K, WORDS, BITS)
        x3, y3 = _neighbours(x, START, 3, K, WORDS, BITS)
        others = tl.maximum(tl.maximum(tl.abs(x2), tl.abs(y2)), tl.maximum(tl.abs(x3), tl.abs(y3)))
        largest = tl.maximum(largest, others)
        total += (x2 + y2) + (x3 + y3)
    # Integers know no NaN: where x has one, what they are worth is infinite, so that it shows in every product.
    largest = tl.where(total != total, float("inf"), largest)
    most = tl.maximum(tl.max(tl.reshape(largest, (LOADS, LOAD_WORDS)), axis=1), 1e-30)
    factor = _LARGEST / most
    spread = tl.reshape(tl.broadcast_to(factor[:, None], (LOADS, LOAD_WORDS)), (WORDS,))
    if BITS == 4:
        low_even, high_even = as_bytes(x0, x2, y0, y2, spread, NATIVE)
        low_odd, high_odd = as_bytes(x1, x3, y1, y3, spread, NATIVE)
    else:
        low_even, high_even = as_bytes(x0, x1, y0, y1, spread, NATIVE)
        low_odd, high_odd = low_even, high_even
    total = tl.sum(tl.reshape(total, (LOADS, LOAD_WORDS)), axis=1)
    worth = most * (_WORTH / 16 if BITS == 4 else _WORTH)
    even = _quarters(low_even, LOADS) + _quarters(high_even, LOADS)
    odd = _quarters(low_odd, LOADS) + _quarters(high_odd, LOADS)
    return even + odd + (worth, total)


@triton.jit
def _words(base, FIRST: tl.constexpr, COUNT: tl.constexpr, ALL: tl.constexpr):
    """int32 [COUNT] from FIRST on, of which there are ALL."""
    at = FIRST + tl.arange(0, COUNT)
    if FIRST + COUNT > ALL:
        words = tl.load(base + at, mask=at < ALL, other=0)
    else:
        words = tl.load(base + at)
    return words


@triton.jit
def _stored(
    codes, scales, column, PLACE: tl.constexpr, START: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Of the column PLACE behind `column`: its codes from START on and, of four bits, their groups' scales and bases
    (of eight, the codes again, which nobody looks at). Columns differ by constants, which cost no instruction."""
    ROW: tl.constexpr = K * BITS // 32
    words = _words(codes + column * ROW + PLACE * ROW, START * BITS // 32, DEPTH * BITS // 32, ROW)
    if BITS == 4:
        GROUPS: tl.constexpr = K // 32
        of_groups = _words(scales + column * GROUPS + PLACE * GROUPS, START // 32, DEPTH // 32, GROUPS)
    else:
        of_groups = words
    return words, of_groups


@triton.jit
def stored_columns(
    codes, scales, column, other, PLACE: tl.constexpr, START: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """What a product from START on reads of an eight of columns, four PLACE behind `column` and four PLACE behind
    `other`: nothing of their matrix is left to be waited for later."""
    some = [_stored(codes, scales, column, PLACE + i, START, K, DEPTH, BITS) for i in (0, 1, 2, 3)]
    others = [_stored(codes, scales, other, PLACE + i, START, K, DEPTH, BITS) for i in (0, 1, 2, 3)]
    return some + others


@triton.jit
def _dots(part, stored, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr):
    """A column's products with a part of x, summed over each load: [DEPTH * BITS / 128]. Of eight bits they lack the
    column's scale."""
    worth, total = part[16], part[17]
    quarters = _quarters(stored[0], DEPTH * BITS // 128)
    if BITS == 4:
        scale, base = scale_and_base(stored[1])
        dots = nibble_dots(quarters, part, NATIVE).to(tl.float32) * worth
        dots = dots * scale + total * (base + CODE_OFFSET * scale)
    else:
        dots = byte_dots(quarters, part, NATIVE).to(tl.float32) * worth
    return dots


@triton.jit
def packed_sums(
    x, stored, codes, scales, column, other,
    STEP: tl.constexpr, EIGHTS: tl.constexpr, K: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """[8] of each eight of columns, an eight STEP behind the one before: x [K] times them, where the first DEPTH of the
    first eight are `stored` already. Of eight bits they lack the columns' scales. All share what is made of x, and what
    comes next of the matrix is on its way while this is multiplied."""
    sums = ()
    for start in tl.static_range(0, K, DEPTH):
        after = ()
        for eight in tl.static_range(EIGHTS):
            if eight + 1 < EIGHTS:
                following = stored_columns(codes, scales, column, other, (eight + 1) * STEP, start, K, DEPTH, BITS)
            elif start + DEPTH < K:
                following = stored_columns(codes, scales, column, other, 0, start + DEPTH, K, DEPTH, BITS)
            else:
                following = stored
            if eight == 0:
                part = _part_of_x(x, start, K, DEPTH, BITS, NATIVE)
            dots = [_dots(part, each, DEPTH, BITS, NATIVE) for each in stored]
            if start > 0:
                dots = _added(sums[eight], dots)
            after = after + (dots,)
            stored = following
        sums = after
    return [_over_threads(each) for each in sums]


@triton.jit
def _added(a, b):
    return [a[i] + b[i] for i in (0, 1, 2, 3, 4, 5, 6, 7)]


@triton.jit
def _over_threads(eight):
    """[8]: each of so many tensors summed."""
    four = [tl.join(eight[i], eight[i + 4]) for i in (0, 1, 2, 3)]
    joined = tl.join(tl.join(four[0], four[2]), tl.join(four[1], four[3]))
    return tl.reshape(tl.sum(joined, axis=0), (8,))


@triton.jit
def column_scales(scales, column, WIDTH: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr):
    """What sums of COUNT times WIDTH columns lack, a tensor [WIDTH] each; of four bits nothing."""
    found = ()
    for each in tl.static_range(COUNT):
        found = found + (_column_scales(scales, column + each * WIDTH, WIDTH, BITS),)
    return found


@triton.jit
def _column_scales(scales, column, WIDTH: tl.constexpr, BITS: tl.constexpr):
    return tl.load(scales + column + tl.arange(0, WIDTH)) if BITS == 8 else 1.0


@triton.jit(do_not_specialize=["num_sums"])
def packed_normed_gemv_kernel(
    x, sums, codes, scales, out, num_sums, eps,
    K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, MAX_SUMS: tl.constexpr,
    NATIVE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] fp32 = norm(x) @ w.T, where x is the scaled residual that the kernel before wrote."""
    if PDL and EARLY:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS
    stored = stored_columns(codes, scales, column, column + 4, 0, 0, K, DEPTH, BITS)
    lacking = column_scales(scales, column, 8, COLUMNS // 8, BITS)
    if PDL:
        gdc_wait()
    squares = partial_squares(sums, num_sums, MAX_SUMS)
    results = packed_sums(
        x, stored, codes, scales, column, column + 4, 8, COLUMNS // 8, K, DEPTH, BITS, NATIVE,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    norm = norm_factor(squares, eps, K)
    for eight in tl.static_range(COLUMNS // 8):
        tl.store(out + column + eight * 8 + tl.arange(0, 8), results[eight] * norm * lacking[eight])


@triton.jit(do_not_specialize=["num_sums"])
def packed_gate_up_gemv_kernel(
    x, sums, codes, scales, out, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr,
    MAX_SUMS: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] = silu(gate) * up of norm(x); the matrix is [2 N, K], the gate's rows first. COLUMNS of either a
    program: an eight is of both."""
    if PDL and EARLY:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS
    stored = stored_columns(codes, scales, column, column + N, 0, 0, K, DEPTH, BITS)
    of_gate = column_scales(scales, column, 4, COLUMNS // 4, BITS)
    of_up = column_scales(scales, column + N, 4, COLUMNS // 4, BITS)
    if PDL:
        gdc_wait()
    squares = partial_squares(sums, num_sums, MAX_SUMS)
    results = packed_sums(
        x, stored, codes, scales, column, column + N, 4, COLUMNS // 4, K, DEPTH, BITS, NATIVE,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_launch_dependents()
    norm = norm_factor(squares, eps, K)
    for eight in tl.static_range(COLUMNS // 4):
        gate, up = tl.split(tl.trans(tl.reshape(results[eight], (2, 4))))
        gate *= norm * of_gate[eight]
        up *= norm * of_up[eight]
        active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
        tl.store(out + column + eight * 4 + tl.arange(0, 4), active)


@triton.jit
def packed_residual_gemv_kernel(
    x, codes, scales, residual, norm_weight, scaled, sums,
    K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BITS: tl.constexpr, NATIVE: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [N] += x @ w.T in place; scaled = residual * norm_weight; sums gets one partial sum of squares a
    program, at the program's index. COLUMNS is 8."""
    if PDL and EARLY:
        gdc_launch_dependents()
    column = tl.program_id(0) * COLUMNS
    at = column + tl.arange(0, COLUMNS)
    stored = stored_columns(codes, scales, column, column + 4, 0, 0, K, DEPTH, BITS)
    lacking = _column_scales(scales, column, COLUMNS, BITS)
    norm = tl.load(norm_weight + at).to(tl.float32)
    if PDL:
        gdc_wait()
    before = tl.load(residual + at).to(tl.float32)
    results = packed_sums(x, stored, codes, scales, column, column + 4, 8, 1, K, DEPTH, BITS, NATIVE)
    if PDL and not EARLY:
        gdc_launch_dependents()
    after = (before + results[0] * lacking).to(residual.dtype.element_ty)
    tl.store(residual + at, after)
    after = after.to(tl.float32)
    tl.store(scaled + at, (after * norm).to(scaled.dtype.element_ty))
    tl.store(sums + tl.program_id(0), tl.sum(after * after, axis=0))

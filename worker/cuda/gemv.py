"""Matrix times one row, the linears of a decode step of width 1. Plain fp32 multiply-adds, no tensor cores.

A program owns a few output columns and all of their weights, so nothing is reduced across programs. The RMS norms cost
no launch of their own: whoever writes the residual also writes residual * norm_weight and one partial sum of squares a
program, and the next linear multiplies its result by the reciprocal root mean square. This needs bfloat16's range,
since the product is stored before it is normalised. Wider steps: `worker.cuda.linear`.

Launched as programmatic dependents, kernels load their first weights before they wait for the kernel before them;
everything that is not a weight is read after the wait.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _weights(w, columns, start, K: tl.constexpr, DEPTH: tl.constexpr):
    return tl.load(w + columns[:, None] * K + (start + tl.arange(0, DEPTH))[None, :])


@triton.jit
def _products(x, first, w, columns, K: tl.constexpr, DEPTH: tl.constexpr):
    """[columns]: x [K] times the columns' weights, the first DEPTH of which were already loaded.

    Every column's lanes load x for themselves. A load of [DEPTH] would have to change its layout through shared memory
    to meet the weights, and that barrier would stop the loads after it from being issued early.
    """
    lanes = columns[:, None] * 0 + tl.arange(0, DEPTH)[None, :]
    acc = tl.load(x + lanes).to(tl.float32) * first.to(tl.float32)
    for start in tl.static_range(DEPTH, K, DEPTH):
        part = tl.load(x + start + lanes).to(tl.float32)
        acc += part * _weights(w, columns, start, K, DEPTH).to(tl.float32)
    return tl.sum(acc, axis=1)


@triton.jit
def partial_squares(sums, num_sums, MAX_SUMS: tl.constexpr):
    """What `norm_factor` is made of; asked for before the products, and summed behind them."""
    parts = tl.arange(0, MAX_SUMS)
    return tl.load(sums + parts, mask=parts < num_sums, other=0.0)


@triton.jit
def norm_factor(squares, eps, K: tl.constexpr):
    """The reciprocal root mean square of a row. All warps wait for each other here."""
    return tl.rsqrt(tl.sum(squares, axis=0) / K + eps)


@triton.jit(do_not_specialize=["num_sums"])
def normed_gemv_kernel(
    x, sums, w, out, num_sums, eps,
    K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MAX_SUMS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] fp32 = norm(x) @ w.T, where x is the scaled residual that the kernel before wrote."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = _weights(w, columns, 0, K, DEPTH)
    if PDL:
        gdc_wait()
    squares = partial_squares(sums, num_sums, MAX_SUMS)
    acc = _products(x, first, w, columns, K, DEPTH)
    if PDL and not EARLY:
        gdc_launch_dependents()
    tl.store(out + columns, acc * norm_factor(squares, eps, K))


@triton.jit(do_not_specialize=["num_sums"])
def normed_gate_up_gemv_kernel(
    x, sums, w, out, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MAX_SUMS: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [N] = silu(gate) * up of norm(x); w is [2 N, K], the gate's rows first."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lanes = columns[:, None] * 0 + tl.arange(0, DEPTH)[None, :]
    gate_tile = _weights(w, columns, 0, K, DEPTH).to(tl.float32)
    up_tile = _weights(w, columns + N, 0, K, DEPTH).to(tl.float32)
    if PDL:
        gdc_wait()
    squares = partial_squares(sums, num_sums, MAX_SUMS)
    part = tl.load(x + lanes).to(tl.float32)
    gate = part * gate_tile
    up = part * up_tile
    for start in tl.static_range(DEPTH, K, DEPTH):
        part = tl.load(x + start + lanes).to(tl.float32)
        gate += part * _weights(w, columns, start, K, DEPTH).to(tl.float32)
        up += part * _weights(w, columns + N, start, K, DEPTH).to(tl.float32)
    if PDL and not EARLY:
        gdc_launch_dependents()
    scale = norm_factor(squares, eps, K)
    gate_sum = tl.sum(gate, axis=1) * scale
    active = gate_sum * tl.sigmoid(gate_sum) * tl.sum(up, axis=1) * scale
    tl.store(out + columns, active.to(out.dtype.element_ty))


@triton.jit
def residual_gemv_kernel(
    x, w, residual, norm_weight, scaled, sums,
    K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [N] += x @ w.T in place; scaled = residual * norm_weight; sums gets one partial sum of squares a
    program, at the program's index."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = _weights(w, columns, 0, K, DEPTH)
    norm = tl.load(norm_weight + columns).to(tl.float32)
    if PDL:
        gdc_wait()
    before = tl.load(residual + columns).to(tl.float32)
    acc = _products(x, first, w, columns, K, DEPTH)
    if PDL and not EARLY:
        gdc_launch_dependents()
    after = (before + acc).to(residual.dtype.element_ty)
    tl.store(residual + columns, after)
    after = after.to(tl.float32)
    tl.store(scaled + columns, (after * norm).to(scaled.dtype.element_ty))
    tl.store(sums + tl.program_id(0), tl.sum(after * after, axis=0))


@triton.jit
def leave_best_of_row(rounded, columns, logits, best, best_id, N: tl.constexpr, STORE_LOGITS: tl.constexpr):
    """What a program of a lone row's LM head leaves of its logits, `rounded` [COLUMNS]: see `head_gemv_kernel`."""
    inside = columns < N
    if STORE_LOGITS:
        tl.store(logits + columns, rounded, mask=inside)
    value = rounded.to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    value = tl.where(inside, value, float("-inf"))
    top = tl.max(value, axis=0)
    tl.store(best + tl.program_id(0), top)
    tl.store(best_id + tl.program_id(0), tl.min(tl.where(value == top, columns, N), axis=0))


@triton.jit(do_not_specialize=["num_sums"])
def head_gemv_kernel(
    x, sums, w, logits, best, best_id, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MAX_SUMS: tl.constexpr,
    STORE_LOGITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The LM head: each program's largest logit and its lowest token id into best, best_id [programs], and the logits
    [N] themselves where asked for. A NaN counts as +inf, so that it shows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.minimum(columns, N - 1)
    first = _weights(w, rows, 0, K, DEPTH)
    if PDL:
        gdc_wait()
    squares = partial_squares(sums, num_sums, MAX_SUMS)
    acc = _products(x, first, w, rows, K, DEPTH)
    if PDL:
        gdc_launch_dependents()
    rounded = (acc * norm_factor(squares, eps, K)).to(w.dtype.element_ty)
    leave_best_of_row(rounded, columns, logits, best, best_id, N, STORE_LOGITS)

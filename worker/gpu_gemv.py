"""Matrix times a few rows (1 to 4), the linears of a narrow decode step. Plain fp32 multiply-adds, no tensor cores.

A program owns a few output columns and all of their weights, so nothing is reduced across programs. The RMS norms cost
no launch of their own: whoever writes the residual also writes residual * norm_weight and one partial sum of squares a
program, and the next linear multiplies its result by the row's reciprocal root mean square. This needs bfloat16's
range, since the product is stored before it is normalised. Not for wider steps: `gpu_linear`.

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
def _inputs(x, start, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.arange(0, ROWS)
    return tl.load(x + rows[:, None] * K + (start + tl.arange(0, DEPTH))[None, :]).to(tl.float32)


@triton.jit
def _products(x, first, w, columns, K: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """[ROWS, columns]: x [ROWS, K] times the columns' weights, the first DEPTH of which were already loaded."""
    part = _inputs(x, 0, K, ROWS, DEPTH)
    acc = part[:, None, :] * first.to(tl.float32)[None, :, :]
    for start in tl.static_range(DEPTH, K, DEPTH):
        part = _inputs(x, start, K, ROWS, DEPTH)
        acc += part[:, None, :] * _weights(w, columns, start, K, DEPTH).to(tl.float32)[None, :, :]
    return tl.sum(acc, axis=2)


@triton.jit
def _reciprocal_rms(sums, num_sums, hidden, eps, ROWS: tl.constexpr, MAX_SUMS: tl.constexpr):
    rows = tl.arange(0, ROWS)
    parts = tl.arange(0, MAX_SUMS)
    squares = tl.load(sums + rows[:, None] * MAX_SUMS + parts[None, :], mask=(parts < num_sums)[None, :], other=0.0)
    return tl.rsqrt(tl.sum(squares, axis=1) / hidden + eps)


@triton.jit(do_not_specialize=["num_sums"])
def normed_gemv_kernel(
    x, sums, w, out, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MAX_SUMS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [ROWS, N] fp32 = norm(x) @ w.T, where x is the scaled residual that the kernel before wrote."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = _weights(w, columns, 0, K, DEPTH)
    if PDL:
        gdc_wait()
    scale = _reciprocal_rms(sums, num_sums, K, eps, ROWS, MAX_SUMS)
    acc = _products(x, first, w, columns, K, ROWS, DEPTH) * scale[:, None]
    if PDL and not EARLY:
        gdc_launch_dependents()
    tl.store(out + tl.arange(0, ROWS)[:, None] * N + columns[None, :], acc)


@triton.jit(do_not_specialize=["num_sums"])
def normed_gate_up_gemv_kernel(
    x, sums, w, out, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MAX_SUMS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [ROWS, N] = silu(gate) * up of norm(x); w is [2 N, K], the gate's rows first."""
    if PDL and EARLY:
        gdc_launch_dependents()
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first_gate = _weights(w, columns, 0, K, DEPTH)
    first_up = _weights(w, columns + N, 0, K, DEPTH)
    if PDL:
        gdc_wait()
    scale = _reciprocal_rms(sums, num_sums, K, eps, ROWS, MAX_SUMS)[:, None]
    gate = _products(x, first_gate, w, columns, K, ROWS, DEPTH) * scale
    up = _products(x, first_up, w, columns + N, K, ROWS, DEPTH) * scale
    if PDL and not EARLY:
        gdc_launch_dependents()
    active = gate * tl.sigmoid(gate) * up
    tl.store(out + tl.arange(0, ROWS)[:, None] * N + columns[None, :], active.to(out.dtype.element_ty))


@triton.jit
def residual_gemv_kernel(
    x, w, residual, norm_weight, scaled, sums,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MAX_SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """residual [ROWS, N] += x @ w.T in place; scaled = residual * norm_weight; sums [ROWS, MAX_SUMS] gets one partial
    sum of squares at this program's index, so there may be at most MAX_SUMS programs."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = _weights(w, columns, 0, K, DEPTH)
    norm = tl.load(norm_weight + columns).to(tl.float32)
    if PDL:
        gdc_wait()
    at = rows[:, None] * N + columns[None, :]
    before = tl.load(residual + at).to(tl.float32)
    acc = _products(x, first, w, columns, K, ROWS, DEPTH)
    if PDL:
        gdc_launch_dependents()
    after = (before + acc).to(residual.dtype.element_ty)
    tl.store(residual + at, after)
    after = after.to(tl.float32)
    tl.store(scaled + at, (after * norm[None, :]).to(scaled.dtype.element_ty))
    tl.store(sums + rows * MAX_SUMS + tl.program_id(0), tl.sum(after * after, axis=1))


@triton.jit(do_not_specialize=["num_sums", "num_rows", "num_programs"])
def head_gemv_kernel(
    x, sums, w, logits, best, best_id, num_sums, eps, num_rows, num_programs,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    MAX_SUMS: tl.constexpr, STORE_LOGITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The LM head: each program's largest logit and its lowest token id into best, best_id [rows, num_programs], and
    the logits [rows, N] themselves where asked for. A NaN counts as +inf, so that it shows."""
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < N
    first = _weights(w, tl.minimum(columns, N - 1), 0, K, DEPTH)
    if PDL:
        gdc_wait()
    scale = _reciprocal_rms(sums, num_sums, K, eps, ROWS, MAX_SUMS)
    acc = _products(x, first, w, tl.minimum(columns, N - 1), K, ROWS, DEPTH) * scale[:, None]
    if PDL:
        gdc_launch_dependents()
    rounded = acc.to(w.dtype.element_ty)
    mine = (rows < num_rows)[:, None] & inside[None, :]
    if STORE_LOGITS:
        tl.store(logits + rows[:, None] * N + columns[None, :], rounded, mask=mine)
    value = rounded.to(tl.float32)
    value = tl.where(value != value, float("inf"), value)
    value = tl.where(inside[None, :], value, float("-inf"))
    top = tl.max(value, axis=1)
    top_id = tl.min(tl.where(value == top[:, None], columns[None, :], N), axis=1)
    at = rows * num_programs + tl.program_id(0)
    tl.store(best + at, top, mask=rows < num_rows)
    tl.store(best_id + at, top_id, mask=rows < num_rows)

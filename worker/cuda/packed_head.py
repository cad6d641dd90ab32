"""An LM head of eight bits in a decode step: `gemv.head_gemv_kernel` and `linear.head_kernel` for packed ones.

Columns are tokens, of which there may be any number: no program reads beyond the last.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.gemv import leave_best_of_row, norm_factor, partial_squares
from worker.cuda.linear import leave_best
from worker.cuda.packed_codes import finished
from worker.cuda.packed_gemv import packed_sums, stored_columns
from worker.cuda.packed_linear import packed_rows, packed_weights


@triton.jit(do_not_specialize=["num_sums"])
def packed_head_gemv_kernel(
    x, sums, codes, scales, logits, best, best_id, num_sums, eps,
    N: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, MAX_SUMS: tl.constexpr,
    STORE_LOGITS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each program's largest logit and its lowest token id into best, best_id [programs], and the logits [N] themselves
    where asked for, of logits' type. A NaN counts as +inf, so that it shows. COLUMNS is 8, and N not less: the last
    program has some of the one before again where it has no 8 of its own."""
    column = tl.minimum(tl.program_id(0) * COLUMNS, N - COLUMNS)
    at = column + tl.arange(0, COLUMNS)
    stored = stored_columns(codes, scales, column, column + 4, 0, 0, K, DEPTH, 8)
    lacking = tl.load(scales + at)
    if PDL:
        gdc_wait()
    squares = partial_squares(sums, num_sums, MAX_SUMS)
    results = packed_sums(x, stored, codes, scales, column, column + 4, 8, 1, K, DEPTH, 8, NATIVE)
    if PDL:
        gdc_launch_dependents()
    rounded = (results[0] * norm_factor(squares, eps, K) * lacking).to(logits.dtype.element_ty)
    leave_best_of_row(rounded, at, logits, best, best_id, N, STORE_LOGITS)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def packed_head_kernel(
    x, codes, scales, logits, best, best_id, num_rows, num_parts,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    STORE_LOGITS: tl.constexpr, NATIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same of several rows: best, best_id [rows, num_parts], and the logits [rows, N]."""
    part = tl.program_id(1)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = tl.minimum(columns, N - 1)
    lacking = tl.load(scales + read)[:, None]
    if PDL:
        gdc_wait()
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for k in range(0, K, DEPTH):
        weights = packed_weights(x, codes, scales, read, k, K, COLUMNS, DEPTH, 8, NATIVE)
        acc = tl.dot(weights, packed_rows(x, rows, k, K, DEPTH), acc, input_precision="ieee")
        acc = finished(acc, NATIVE)
    if PDL:
        gdc_launch_dependents()
    rounded = tl.trans(acc * lacking).to(logits.dtype.element_ty)
    leave_best(rounded, rows, columns, part, logits, best, best_id, num_rows, num_parts, N, STORE_LOGITS)

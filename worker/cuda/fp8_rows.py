"""Rows of a step or a forward become e4m3 codes and a scale each, inside Triton kernels: `worker.cuda.fp8.fp8_rows`.

A row is quantized by a program that has it whole: the kernel that norms it, or the one here.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from worker.cuda.e4m3 import as_e4m3
from worker.cuda.fp8 import LARGEST, LEAST

_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)


@triton.jit
def store_row(x, codes, scales, row, columns, inside, K: tl.constexpr, NATIVE: tl.constexpr):
    """The row x, float32 [columns] and zero where not `inside`, as codes [rows, K] and its scale in scales [rows]. A
    number that is not finite makes the scale none, and so shows in every product."""
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), axis=0), _LEAST), _LARGEST) + tl.sum(x * 0.0, axis=0)
    code = as_e4m3(x * tl.div_rn(1.0, scale), NATIVE)
    tl.store(codes + row.to(tl.int64) * K + columns, code, mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def fp8_rows_kernel(
    x,
    x_stride,
    codes,
    scales,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (rows): x [rows, K], `x_stride` elements from row to row."""
    if PDL and EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    if PDL:
        gdc_wait()
    value = tl.load(x + row.to(tl.int64) * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if PDL and not EARLY:
        gdc_launch_dependents()
    store_row(value, codes, scales, row, columns, inside, K, NATIVE)

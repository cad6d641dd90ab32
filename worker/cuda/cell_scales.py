"""Triton's part of scaled cell rows: a head becomes bytes and a scale. See `worker.cell_rows`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.cell_rows import LARGEST, SCALED, scales_at

_LARGEST = tl.constexpr(LARGEST)
# Weights of 16-bit dots are multiplied by a value's scale, and by this, so that they keep their precision: e4m3 values
# of size 1 have a scale of 2 ** -9 or so.
WEIGHT_GAIN = tl.constexpr(256.0)


def row_constants(keys: Tensor, num_kv_heads: int, head_dim: int) -> dict[str, int | bool]:
    """What a kernel is told of the rows of one layer, [num_cells + 1, ...]: `CELL`, elements from row to row, and where
    in it scales begin and how far apart they are from row to row, in float32 words."""
    scaled = keys.dtype == SCALED
    row = keys[0].numel()
    return {
        "CELL": row,
        "SCALED": scaled,
        "SCALES_AT": scales_at(num_kv_heads, head_dim) if scaled else 0,
        "SCALE_STRIDE": row // 4 if scaled else 0,
        "NATIVE": keys.is_cuda,
    }


@triton.jit
def low_bytes(pairs, NATIVE: tl.constexpr):
    """float16 of the e4m3 in the low byte of each int16. NATIVE: by the GPU's own instructions, two at a time, since
    bytes by themselves reach the tensor cores' registers one by one."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4420; mov.b32 {l, h}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, l; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def high_bytes(pairs, NATIVE: tl.constexpr):
    """The same of the high bytes."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $1, 0, 0x4431; mov.b32 {l, h}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, l; }",
            "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    return ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def head_scales(largest, zeros):
    """Scales of heads whose largest magnitude is `largest`; `zeros` is the sum of their numbers times zero, which says
    whether they are finite."""
    return tl.where(largest == 0, 1.0, tl.div_rn(largest, _LARGEST)) + zeros

"""Numbers become e4m3 inside Triton kernels: those of rows that products of fp8 take, and those of cells."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

_LARGEST = tl.constexpr(448.0)
# Of e4m3 the least number with all its bits, the code of none, and a float32 whose last bit is e4m3's least step.
_LEAST_NORMAL = tl.constexpr(2.0**-6)
_NO_NUMBER = tl.constexpr(0x7F)
_SUBNORMAL_ROUND = tl.constexpr(1.5 * 2.0 ** (23 - 9))


@triton.jit
def as_e4m3(x, NATIVE: tl.constexpr):
    """float32 to the nearest e4m3, even codes on ties; what is beyond its range becomes the range's end. Triton's
    interpreter cuts bits off, so without NATIVE x is rounded beforehand."""
    if not NATIVE:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (x + _SUBNORMAL_ROUND) - _SUBNORMAL_ROUND
        x = tl.where(tl.abs(x) < _LEAST_NORMAL, small, rounded)
        code = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.where(x == x, code, _NO_NUMBER).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)

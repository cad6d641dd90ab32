# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803
"""Floats as integers of the same order, so that a search over values is a search over whole numbers (Triton)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_of(x, KEY_SHIFT: tl.constexpr):
    """An int32 that orders as the float32 `x` does, less the KEY_SHIFT low bits that its original type lacks."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFT


@triton.jit
def value_of(key, KEY_SHIFT: tl.constexpr):
    """The float32 whose key this is."""
    bits = (key << KEY_SHIFT) | ((key >> 31) & ((1 << KEY_SHIFT) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def floor_key(x, KEY_SHIFT: tl.constexpr):
    """The smallest key of a value that is at least float32 `x` and above -infinity."""
    key = key_of(x, 0)
    rounded = (key >> KEY_SHIFT) + ((key >= 0) & ((key & ((1 << KEY_SHIFT) - 1)) != 0)).to(tl.int32)
    return tl.maximum(rounded, key_of(float("-inf") + tl.zeros_like(x), KEY_SHIFT) + 1)

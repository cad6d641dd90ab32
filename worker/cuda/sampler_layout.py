# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""How the GPU sampler's kernels cut a row of logits, and what they do with a piece (Triton).

A group is 64 consecutive tokens; 64 consecutive groups are a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
CHUNK_GROUPS = tl.constexpr(64)
CHUNK = tl.constexpr(64 * 64)
RACE_GROUPS = tl.constexpr(16)  # that race at once
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sum_of(block):
    return tl.sum(tl.sum(block, axis=1), axis=0)


@triton.jit
def scale_of(temperature):
    """Logits times this are base-2 exponents. A temperature that all but vanishes stays a finite factor."""
    return LOG2_E / tl.maximum(temperature, 1e-30)

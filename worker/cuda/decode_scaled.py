"""Decode attention's loop over scaled cells: the same running softmax, with two dimensions in each word that is loaded.

The tensor cores want 16-bit operands in an order that their own loads give to words of 16 bits and not to bytes. So a
row is read as words of two neighbouring dimensions, and what is multiplied are the even and the odd dimensions by
themselves: a dot does not care for their order. A scale multiplies a score, or a weight, never a number of a row.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from worker.cuda.cell_scales import WEIGHT_GAIN, high_bytes, low_bytes


@triton.jit
def older_scaled_cells(
    q, largest, total, acc, cells, k_heads, v_heads, k_scales, v_scales, begin, end, scale,
    CELL: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr, GROUP_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Goes on with a running softmax over positions [begin, end): `largest` and `total` [GROUP_PADDED], `acc`
    [GROUP_PADDED, D_PADDED]. Pointers are those of one head's bytes and scales in cell 0. Lanes past the end read the
    last cell again."""
    half: tl.constexpr = D_PADDED // 2
    lanes = tl.arange(0, BLOCK)
    words = tl.arange(0, half)[None, :]
    inside = words < D // 2
    k_words = k_heads.to(tl.pointer_type(tl.int16), bitcast=True)
    v_words = v_heads.to(tl.pointer_type(tl.int16), bitcast=True)
    even, odd = tl.split(tl.reshape(acc * WEIGHT_GAIN, [GROUP_PADDED, half, 2]))
    if q.dtype != tl.float32:
        q = q.to(tl.float16)
    q_even, q_odd = tl.split(tl.reshape(q, [GROUP_PADDED, half, 2]))
    for start in range(begin, end, BLOCK):
        at = start + lanes
        index = tl.load(cells + tl.minimum(at, end - 1)).to(tl.int64)
        cell = index * (CELL // 2)
        k = tl.load(k_words + cell[None, :] + tl.trans(words), mask=tl.trans(inside), other=0)
        scores = tl.dot(q_even, low_bytes(k, NATIVE).to(q_even.dtype), input_precision="ieee")
        scores = tl.dot(q_odd, high_bytes(k, NATIVE).to(q_odd.dtype), scores, input_precision="ieee")
        scores *= (tl.load(k_scales + index * SCALE_STRIDE) * scale)[None, :]
        scores = tl.where((at < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        kept = tl.exp2(largest - higher)
        p = tl.exp2(scores - higher[:, None])
        total = total * kept + tl.sum(p, axis=1)
        p = (p * (tl.load(v_scales + index * SCALE_STRIDE) * WEIGHT_GAIN)[None, :]).to(q_even.dtype)
        v = tl.load(v_words + cell[:, None] + words, mask=inside, other=0)
        even = tl.dot(p, low_bytes(v, NATIVE).to(p.dtype), even * kept[:, None], input_precision="ieee")
        odd = tl.dot(p, high_bytes(v, NATIVE).to(p.dtype), odd * kept[:, None], input_precision="ieee")
        largest = higher
    acc = tl.reshape(tl.join(even, odd), [GROUP_PADDED, D_PADDED]) * (1.0 / WEIGHT_GAIN)
    return largest, total, acc

"""Partial results of decode attention: a row's context in several programs, and how they become one.

The parts of a softmax combine by their largest scores and their sums (Milakov and Gimelshein 2018). The last program of
a row to arrive does it.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

# Partial results that are summed at a time where their number is not known in advance.
_AT_ONCE = tl.constexpr(4)


@triton.jit
def splits_used(num_cells, SPLITS: tl.constexpr, SHARE: tl.constexpr):
    """Of SPLITS programs, those that have work: a split takes SHARE cells before another one is used."""
    return tl.minimum(tl.maximum(tl.cdiv(num_cells, SHARE), 1), SPLITS)


@triton.jit
def leave_part(part_out, part_max, part_sum, part, acc, largest, total, dims, mine, is_head, D: tl.constexpr):
    """Partial results of heads [n] for whoever arrives last."""
    tl.store(part_out + part[:, None] * D + dims, acc, mask=mine)
    tl.store(part_max + part, largest, mask=is_head)
    tl.store(part_sum + part, total, mask=is_head)


@triton.jit
def arrives_last(arrived, expected):
    """Whether all other programs of `expected` have come here and their stores are seen; the count is zero again."""
    tl.debug_barrier()
    last = tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(arrived, 0)
    return last


@triton.jit
def combined(part_out, part_max, part_sum, at, dims, inside, used, SPLITS: tl.constexpr, D: tl.constexpr):
    """Heads [n, dims] of the whole context from the first `used` partial results of heads `at` [n]. The first split
    holds the new token, so the largest score is finite."""
    none = float("-inf")
    largest = tl.load(part_max + at * SPLITS, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        score = tl.load(part_max + at * SPLITS + split, mask=at * 0 + split < used, other=none, cache_modifier=".cg")
        largest = tl.maximum(largest, score)
    total = tl.zeros_like(largest)
    acc = tl.zeros_like(at[:, None] + dims).to(tl.float32)
    for split in tl.static_range(SPLITS):
        there = at * 0 + split < used
        score = tl.load(part_max + at * SPLITS + split, mask=there, other=none, cache_modifier=".cg")
        weight = tl.exp2(score - largest)
        total += weight * tl.load(part_sum + at * SPLITS + split, mask=there, other=0.0, cache_modifier=".cg")
        offsets = (at * SPLITS + split)[:, None] * D + dims
        mask = inside & there[:, None]
        acc += weight[:, None] * tl.load(part_out + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    return acc / total[:, None]


@triton.jit
def combined_pieces(part_out, part_max, part_sum, at, dims, inside, count, HEADS: tl.constexpr, D: tl.constexpr):
    """The same from `count` partial results of heads `at` [n] (of the row's first piece), HEADS apart."""
    none = float("-inf")
    largest = tl.load(part_max + at, cache_modifier=".cg")
    for begin in range(0, count, _AT_ONCE):
        for step in tl.static_range(_AT_ONCE):
            piece = begin + step
            there = at * 0 + piece < count
            score = tl.load(part_max + at + piece * HEADS, mask=there, other=none, cache_modifier=".cg")
            largest = tl.maximum(largest, score)
    total = tl.zeros_like(largest)
    acc = tl.zeros_like(at[:, None] + dims).to(tl.float32)
    for begin in range(0, count, _AT_ONCE):
        for step in tl.static_range(_AT_ONCE):
            piece = begin + step
            there = at * 0 + piece < count
            place = at + piece * HEADS
            score = tl.load(part_max + place, mask=there, other=none, cache_modifier=".cg")
            weight = tl.exp2(score - largest)
            total += weight * tl.load(part_sum + place, mask=there, other=0.0, cache_modifier=".cg")
            mask = inside & there[:, None]
            out = tl.load(part_out + place[:, None] * D + dims, mask=mask, other=0.0, cache_modifier=".cg")
            acc += weight[:, None] * out
    return acc / total[:, None]

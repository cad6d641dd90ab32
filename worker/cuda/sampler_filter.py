# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803
"""Min-p, top-k and top-p on one row, and the draw from what they keep (Triton, called by
`worker.cuda.sampler_kernels`).

The groups that can hold a kept token are listed (the k-th largest of the group maxima is at most the k-th largest
logit, and likewise by mass); only they are searched for the exact threshold. A peaked row so reads a few thousand
logits, a flat one reads the row a few times. No row is sorted.

`row_logits` everywhere is (logits, listed, largest, scale, vocab_size): the row, its list, its largest logit, and the
factor that makes base-2 exponents.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.cuda.float_keys import floor_key, key_of, value_of
from worker.cuda.race import times_of, winner_of
from worker.cuda.sampler_layout import CHUNK, CHUNK_GROUPS, GROUP, LOG2_E, NO_TOKEN, sum_of


@triton.jit
def draw_filtered(row_logits, max_g, mass_g, groups, mass, noise, top_k, top_p, min_p, cut, KEY_SHIFT: tl.constexpr):
    """Min-p, then top-k, then top-p, each a threshold key; then the race of what is left. `noise` is (seed, position).

    A threshold is the smallest key with at most `limit` strictly above it: a count of k - 1 for top-k, a share p of the
    mass for top-p. Of the tokens at the threshold itself the lowest `num_tied` are kept.
    """
    _, listed, largest, scale, vocab_size = row_logits
    has_k = top_k < vocab_size
    top = key_of(largest, KEY_SHIFT)
    start = floor_key(largest + tl.log(min_p) * (LOG2_E / scale), KEY_SHIFT)
    key_g = key_of(max_g, KEY_SHIFT)
    if has_k:
        one_g = tl.full(max_g.shape, 1.0, tl.float32)
        start = _group_threshold(row_logits, key_g, one_g, one_g, start, top, top_k - 1.0, KEY_SHIFT)
    elif min_p == 0:
        one_g = tl.exp2((max_g - largest) * scale)
        # Float32 sums in another order: a little less than what the tokens will add up to.
        start = _group_threshold(row_logits, key_g, one_g, mass_g * 0.9999, start, top, top_p * mass, KEY_SHIFT)
    is_listed = (key_g >= start).to(tl.int32)
    num_listed = tl.sum(is_listed, axis=0)
    tl.store(listed + tl.cumsum(is_listed, axis=0) - 1, groups, mask=is_listed > 0)
    tl.debug_barrier()  # other threads read the list

    threshold = start
    if has_k:
        threshold = _threshold(row_logits, num_listed, start, top, top_k - 1.0, True, KEY_SHIFT)
    above, one, tied, num_tied = 0.0, 0.0, NO_TOKEN + 0, NO_TOKEN + 0
    if has_k | (min_p > 0):
        above, one, num_above, tied = _measure(row_logits, num_listed, threshold, KEY_SHIFT)
        num_tied = tl.minimum(tied, top_k - num_above)
        mass = above + num_tied * one
    if top_p < 1:
        limit = top_p * mass
        k_threshold = threshold
        threshold = _threshold(row_logits, num_listed, k_threshold, top, limit, False, KEY_SHIFT)
        above, one, num_above, tied = _measure(row_logits, num_listed, threshold, KEY_SHIFT)
        num_fitting = tl.minimum(tl.floor((limit - above) / one), 1e9).to(tl.int32) + 1
        num_tied = tl.minimum(num_fitting, tl.where(threshold == k_threshold, tl.minimum(num_tied, tied), tied))
    last_tied = NO_TOKEN + 0
    if num_tied < tied:
        last_tied = _tied_token(row_logits, num_listed, threshold, num_tied, KEY_SHIFT)
    tl.store(cut, threshold)
    tl.store(cut + 1, last_tied)
    return _race(row_logits, num_listed, threshold, last_tied, noise, KEY_SHIFT)


@triton.jit
def _group_threshold(row_logits, key_g, one_g, mass_g, low, high, limit, KEY_SHIFT: tl.constexpr):
    """A bound from the groups alone, at most the row's own threshold: less than what is really above each pivot."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        p1, p2, p3 = _pivots(low, high)
        a1 = _least_above(row_logits, key_g, one_g, mass_g, p1, KEY_SHIFT)
        a2 = _least_above(row_logits, key_g, one_g, mass_g, p2, KEY_SHIFT)
        a3 = _least_above(row_logits, key_g, one_g, mass_g, p3, KEY_SHIFT)
        low, high = _narrow(low, high, p1, p2, p3, a1, a2, a3, limit)
    return low.to(tl.int32)


@triton.jit
def _least_above(row_logits, key_g, one_g, mass_g, pivot, KEY_SHIFT: tl.constexpr):
    """The least that can be above a pivot: of each group that reaches above it, the largest token, or all but 63
    tokens as heavy as the pivot."""
    at_pivot = tl.exp2((value_of(pivot, KEY_SHIFT) - row_logits[2]) * row_logits[3])
    return tl.sum(tl.where(key_g > pivot, tl.maximum(one_g, mass_g - (GROUP - 1) * at_pivot), 0.0), axis=0)


@triton.jit
def _threshold(row_logits, num_listed, low, high, limit, BY_COUNT: tl.constexpr, KEY_SHIFT: tl.constexpr):
    """The smallest key in [low, high] with at most `limit` (tokens, or mass) above it; `high` is one such key.

    Three pivots a pass quarter the range.
    """
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        p1, p2, p3 = _pivots(low, high)
        x1, x2, x3 = value_of(p1, KEY_SHIFT), value_of(p2, KEY_SHIFT), value_of(p3, KEY_SHIFT)
        a1 = tl.zeros((CHUNK_GROUPS, GROUP), tl.float32)
        a2 = tl.zeros((CHUNK_GROUPS, GROUP), tl.float32)
        a3 = tl.zeros((CHUNK_GROUPS, GROUP), tl.float32)
        for first in range(0, num_listed, CHUNK_GROUPS):
            _, mass, x = _load_block(row_logits, first, num_listed)
            if BY_COUNT:
                mass = tl.full(mass.shape, 1.0, tl.float32)
            a1 += tl.where(x > x1, mass, 0.0)
            a2 += tl.where(x > x2, mass, 0.0)
            a3 += tl.where(x > x3, mass, 0.0)
        low, high = _narrow(low, high, p1, p2, p3, sum_of(a1), sum_of(a2), sum_of(a3), limit)
    # The key below 0 is that of -0.0, which compares as 0.0 does.
    return tl.where(low == -1, 0, low).to(tl.int32)


@triton.jit
def _pivots(low, high):
    width = high - low
    return (low + width // 4).to(tl.int32), (low + width // 2).to(tl.int32), (low + width * 3 // 4).to(tl.int32)


@triton.jit
def _narrow(low, high, p1, p2, p3, a1, a2, a3, limit):
    """Keep the quarter of [low, high] that holds the smallest key with at most `limit` above it."""
    new_low = tl.where(a1 <= limit, low, tl.where(a2 <= limit, p1 + 1, tl.where(a3 <= limit, p2 + 1, p3 + 1)))
    new_high = tl.where(a1 <= limit, p1, tl.where(a2 <= limit, p2, tl.where(a3 <= limit, p3, high)))
    return new_low.to(tl.int64), new_high.to(tl.int64)


@triton.jit
def _measure(row_logits, num_listed, threshold, KEY_SHIFT: tl.constexpr):
    """Mass above a threshold, mass of one token at it, number of tokens above it, number of tokens at it."""
    largest, scale = row_logits[2], row_logits[3]
    border = value_of(threshold, KEY_SHIFT)
    mass_above = tl.zeros((CHUNK_GROUPS, GROUP), tl.float32)
    num_above = tl.zeros((CHUNK_GROUPS, GROUP), tl.int32)
    num_at = tl.zeros((CHUNK_GROUPS, GROUP), tl.int32)
    for first in range(0, num_listed, CHUNK_GROUPS):
        _, mass, x = _load_block(row_logits, first, num_listed)
        mass_above += tl.where(x > border, mass, 0.0)
        num_above += (x > border).to(tl.int32)
        num_at += (x == border).to(tl.int32)
    return sum_of(mass_above), tl.exp2((border - largest) * scale), sum_of(num_above), sum_of(num_at)


@triton.jit
def _tied_token(row_logits, num_listed, threshold, ordinal, KEY_SHIFT: tl.constexpr):
    """The `ordinal`-th token at the threshold, counted from 1 in token order."""
    border = value_of(threshold, KEY_SHIFT)
    found = NO_TOKEN + 0
    passed = 0
    for first in range(0, num_listed, CHUNK_GROUPS):
        token, _, x = _load_block(row_logits, first, num_listed)
        is_tied = (x == border).to(tl.int32)
        num_tied = sum_of(is_tied)
        if (passed < ordinal) & (passed + num_tied >= ordinal):
            flat = tl.reshape(is_tied, (CHUNK,))
            is_past = (flat > 0) & (tl.cumsum(flat, axis=0) >= ordinal - passed)
            found = tl.min(tl.where(is_past, tl.reshape(token, (CHUNK,)), NO_TOKEN), axis=0)
        passed += num_tied
    return found


@triton.jit
def _race(row_logits, num_listed, threshold, last_tied, noise, KEY_SHIFT: tl.constexpr):
    """The winner among the kept tokens: those above the threshold and, up to `last_tied`, those at it."""
    border = value_of(threshold, KEY_SHIFT)
    seed, position = noise
    best = 0.0
    winner = NO_TOKEN + 0
    for first in range(0, num_listed, CHUNK_GROUPS):
        token, mass, x = _load_block(row_logits, first, num_listed)
        mass = tl.where((x > border) | ((x == border) & (token <= last_tied)), mass, 0.0)
        score, leader = winner_of(mass / times_of(_load_groups(row_logits, first, num_listed), seed, position), token)
        # Blocks come in token order: a later one must be better.
        winner = tl.where(score > best, leader, winner)
        best = tl.maximum(score, best)
    return winner


@triton.jit
def _load_block(row_logits, first, num_listed):
    """Tokens, masses and logits of the listed groups from `first` on, [64, 64] each; -infinity where there is none."""
    logits, _, largest, scale, vocab_size = row_logits
    position = first + tl.arange(0, CHUNK_GROUPS)
    group = _load_groups(row_logits, first, num_listed)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_there = (position < num_listed)[:, None] & (token < vocab_size)
    x = tl.load(logits + token, mask=is_there, other=float("-inf")).to(tl.float32)
    return token, tl.exp2((x - largest) * scale), x


@triton.jit
def _load_groups(row_logits, first, num_listed):
    """The listed groups int32[64] from `first` on; 0 where there is none."""
    position = first + tl.arange(0, CHUNK_GROUPS)
    return tl.load(row_logits[1] + position, mask=position < num_listed, other=0)

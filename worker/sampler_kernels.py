# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803
"""Triton kernels of `worker.gpu_sampler`, which says what they compute; here is how.

A row of logits is cut into groups of 64 tokens; 64 groups are a chunk. `scan` (a program a chunk) writes each group's
largest logit and each chunk's mass. `draw` (a program a row) works on those where it can: a greedy row finds its
group, an unfiltered row its chunk. A filtered row lists the groups that can hold a kept token (the k-th largest of the
group maxima is at most the k-th largest logit, and likewise by mass) and searches only them for the exact threshold:
a peaked row reads a few thousand logits, a flat one reads the row a few times. No row is sorted.

Logits are compared by integer keys of the same order. Sums run in one fixed order, so a row's draw does not depend on
its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
CHUNK_GROUPS = tl.constexpr(64)
CHUNK = tl.constexpr(64 * 64)
LOOP_STAGES = tl.constexpr(1)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def scan(logits, row_slots, temperatures, group_max, chunk_mass, row_stride, vocab_size, num_chunks):
    """Write group maxima float32[rows, num_chunks * 64] and chunk masses float32[rows, num_chunks].

    A mass is relative to its chunk's largest logit. NaN marks a chunk with a NaN or +infinity.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pointers = logits + row.to(tl.int64) * row_stride + token
    x = tl.load(pointers, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    max_g = tl.max(x, axis=1)
    tl.store(group_max + row * num_chunks * CHUNK_GROUPS + group, max_g)
    largest = tl.max(max_g, axis=0)
    temperature = tl.load(temperatures + tl.load(row_slots + row))
    mass = 0.0
    if temperature > 0:
        base = tl.where(largest == float("-inf"), 0.0, largest)
        mass = _sum(tl.exp2((x - base) * _scale(temperature)))
    num_bad = _sum(((x != x) | (x == float("inf"))).to(tl.int32))
    tl.store(chunk_mass + row * num_chunks + chunk, tl.where(num_bad > 0, float("nan"), mass))


@triton.jit
def draw(
    logits, row_slots, temperatures, top_ks, top_ps, min_ps, seeds, lengths, out_tokens, bad_rows,
    group_max, chunk_mass, listed, cut, row_stride, vocab_size, num_chunks,
    KEY_SHIFT: tl.constexpr, BLOCK_CHUNKS: tl.constexpr,
):  # fmt: skip
    """Draw one row's token from what `scan` wrote. `listed` int32[rows, num_chunks * 64] is scratch; `cut`
    int32[rows, 2] gets a filtered row's threshold key and the last token kept at it."""
    row = tl.program_id(0)
    slot = tl.load(row_slots + row)
    temperature = tl.load(temperatures + slot)
    logits += row.to(tl.int64) * row_stride
    chunks = tl.arange(0, BLOCK_CHUNKS)
    groups = tl.arange(0, BLOCK_CHUNKS * CHUNK_GROUPS)
    num_groups = num_chunks * CHUNK_GROUPS
    max_g = tl.load(group_max + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    mass_c = tl.load(chunk_mass + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
    largest = tl.max(max_g, axis=0)
    mass = tl.sum(mass_c, axis=0)
    is_bad = (mass != mass) | (largest == float("-inf"))
    token = 0
    if is_bad:
        token = 0
    elif temperature == 0:
        token = _first_largest(logits, max_g, groups, largest, vocab_size)
    else:
        scale = _scale(temperature)
        coin = uniform(tl.load(seeds + slot), tl.load(lengths + slot) + 1)
        top_k = tl.load(top_ks + slot)
        top_k = tl.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
        top_p = tl.load(top_ps + slot)
        min_p = tl.load(min_ps + slot)
        max_c = tl.max(tl.reshape(max_g, (BLOCK_CHUNKS, CHUNK_GROUPS)), axis=1)
        mass_c = mass_c * tl.exp2((max_c - largest) * scale)
        if (top_k == vocab_size) & (top_p >= 1) & (min_p == 0):
            token = _draw_unfiltered(logits, mass_c, chunks, coin, largest, scale, vocab_size)
        else:
            listed += row * num_groups
            row_logits = (logits, listed, largest, scale, vocab_size)
            mass = tl.sum(mass_c, axis=0)
            token = _draw_filtered(
                row_logits, max_g, groups, mass, coin, top_k, top_p, min_p, cut + row * 2, KEY_SHIFT
            )  # fmt: skip
    tl.store(out_tokens + row, token)
    tl.store(bad_rows + row, is_bad.to(tl.int32))


@triton.jit
def _first_largest(logits, max_g, groups, largest, vocab_size):
    """The lowest token whose logit is the row's largest."""
    group = tl.min(tl.where(max_g == largest, groups, NO_TOKEN), axis=0)
    token = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == largest, token, NO_TOKEN), axis=0)


@triton.jit
def _draw_unfiltered(logits, mass_c, chunks, coin, largest, scale, vocab_size):
    """Inverse CDF in two levels: the chunk by the chunks' masses, then the token in it."""
    target = coin * tl.sum(mass_c, axis=0)
    chunk = _first_past(mass_c, chunks, target)
    rest = target - tl.sum(tl.where(chunks < chunk, mass_c, 0.0), axis=0)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return _first_past(tl.exp2((x - largest) * scale), token, rest)


@triton.jit
def _first_past(mass, index, target):
    """The first index whose cumulative mass exceeds `target`; the last that has mass if rounding leaves none."""
    is_past = (tl.cumsum(mass, axis=0) > target) & (mass > 0)
    first = tl.min(tl.where(is_past, index, NO_TOKEN), axis=0)
    last = tl.max(tl.where(mass > 0, index, 0), axis=0)
    return tl.where(first == NO_TOKEN, last, first)


@triton.jit
def _draw_filtered(row_logits, max_g, groups, mass, coin, top_k, top_p, min_p, cut, KEY_SHIFT: tl.constexpr):
    """Min-p, then top-k, then top-p, each a threshold key; then the inverse CDF over what is left, in token order.

    A threshold is the smallest key with at most `limit` strictly above it: a count of k - 1 for top-k, a share p of the
    mass for top-p. Of the tokens at the threshold itself the lowest `num_tied` are kept.
    """
    _, listed, largest, scale, vocab_size = row_logits
    has_k = top_k < vocab_size
    top = key_of(largest, KEY_SHIFT)
    start = _floor_key(largest + tl.log(min_p) * (LOG2_E / scale), KEY_SHIFT)
    key_g = key_of(max_g, KEY_SHIFT)
    if has_k:
        start = _group_threshold(key_g, tl.full(max_g.shape, 1.0, tl.float32), start, top, top_k - 1.0)
    elif min_p == 0:
        # Tokens at x or below cannot make up the share 1 - p that top-p leaves out if all of them at x do not.
        lowest = largest + tl.log(0.99 * (1 - top_p) * mass / vocab_size) * (LOG2_E / scale)
        start = tl.minimum(tl.maximum(start, _floor_key(lowest, KEY_SHIFT)), top)
        start = _group_threshold(key_g, tl.exp2((max_g - largest) * scale), start, top, top_p * mass)
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
        last_tied = _find(row_logits, num_listed, threshold, NO_TOKEN, num_tied - 0.5, True, KEY_SHIFT)
    tl.store(cut, threshold)
    tl.store(cut + 1, last_tied)
    target = coin * (above + num_tied * one)
    return _find(row_logits, num_listed, threshold, last_tied, target, False, KEY_SHIFT)


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
        for first in tl.range(0, num_listed, CHUNK_GROUPS, num_stages=LOOP_STAGES):
            _, mass, x = _load_block(row_logits, first, num_listed)
            if BY_COUNT:
                mass = tl.full(mass.shape, 1.0, tl.float32)
            a1 += tl.where(x > x1, mass, 0.0)
            a2 += tl.where(x > x2, mass, 0.0)
            a3 += tl.where(x > x3, mass, 0.0)
        low, high = _narrow(low, high, p1, p2, p3, _sum(a1), _sum(a2), _sum(a3), limit)
    # The key below 0 is that of -0.0, which compares as 0.0 does.
    return tl.where(low == -1, 0, low).to(tl.int32)


@triton.jit
def _group_threshold(key_g, mass_g, low, high, limit):
    """The same among the groups' largest logits alone: never above the row's own threshold."""
    low, high = low.to(tl.int64), high.to(tl.int64)
    while low < high:
        p1, p2, p3 = _pivots(low, high)
        a1 = tl.sum(tl.where(key_g > p1, mass_g, 0.0), axis=0)
        a2 = tl.sum(tl.where(key_g > p2, mass_g, 0.0), axis=0)
        a3 = tl.sum(tl.where(key_g > p3, mass_g, 0.0), axis=0)
        low, high = _narrow(low, high, p1, p2, p3, a1, a2, a3, limit)
    return low.to(tl.int32)


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
    for first in tl.range(0, num_listed, CHUNK_GROUPS, num_stages=LOOP_STAGES):
        _, mass, x = _load_block(row_logits, first, num_listed)
        mass_above += tl.where(x > border, mass, 0.0)
        num_above += (x > border).to(tl.int32)
        num_at += (x == border).to(tl.int32)
    return _sum(mass_above), tl.exp2((border - largest) * scale), _sum(num_above), _sum(num_at)


@triton.jit
def _find(row_logits, num_listed, threshold, last_tied, target, BY_COUNT: tl.constexpr, KEY_SHIFT: tl.constexpr):
    """The first token whose cumulative mass exceeds `target`, in token order over the kept tokens.

    Kept are those above the threshold and, up to `last_tied`, those at it. By count: a mass of 1 for each token at the
    threshold and none else.
    """
    border = value_of(threshold, KEY_SHIFT)
    found = NO_TOKEN + 0
    passed = 0.0
    last = tl.zeros((CHUNK_GROUPS, GROUP), tl.int32)
    for first in tl.range(0, num_listed, CHUNK_GROUPS, num_stages=LOOP_STAGES):
        token, mass, x = _load_block(row_logits, first, num_listed)
        if BY_COUNT:
            mass = tl.where(x == border, 1.0, 0.0)
        else:
            mass = tl.where((x > border) | ((x == border) & (token <= last_tied)), mass, 0.0)
        last = tl.where(mass > 0, token, last)
        block_mass = _sum(mass)
        if (found == NO_TOKEN) & (passed + block_mass > target):
            found = _first_past(tl.reshape(mass, (CHUNK,)), tl.reshape(token, (CHUNK,)), target - passed)
        passed += block_mass
    return tl.where(found == NO_TOKEN, tl.max(tl.max(last, axis=1), axis=0), found)


@triton.jit
def _load_block(row_logits, first, num_listed):
    """Tokens, masses and logits of the listed groups from `first` on, [64, 64] each; -infinity where there is none."""
    logits, listed, largest, scale, vocab_size = row_logits
    position = first + tl.arange(0, CHUNK_GROUPS)
    group = tl.load(listed + position, mask=position < num_listed, other=0)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_there = (position < num_listed)[:, None] & (token < vocab_size)
    x = tl.load(logits + token, mask=is_there, other=float("-inf")).to(tl.float32)
    return token, tl.exp2((x - largest) * scale), x


@triton.jit
def _sum(block):
    return tl.sum(tl.sum(block, axis=1), axis=0)


@triton.jit
def _scale(temperature):
    """Logits times this are base-2 exponents. A temperature that all but vanishes stays a finite factor."""
    return LOG2_E / tl.maximum(temperature, 1e-30)


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
def _floor_key(x, KEY_SHIFT: tl.constexpr):
    """The smallest key of a value that is at least float32 `x` and above -infinity."""
    key = key_of(x, 0)
    rounded = (key >> KEY_SHIFT) + ((key >= 0) & ((key & ((1 << KEY_SHIFT) - 1)) != 0)).to(tl.int32)
    return tl.maximum(rounded, key_of(float("-inf") + tl.zeros_like(x), KEY_SHIFT) + 1)


@triton.jit
def uniform(seed, position):
    """Uniform in [0, 1), a multiple of 2^-24: first word of Philox4x32-10 with the 64-bit seed as its key and
    (position, 0, 0, 0) as its counter."""
    zero = (position * 0).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, position.to(tl.uint32), zero, zero, zero)
    return (word >> 8).to(tl.float32) * (1.0 / 16777216.0)

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: N803
"""The GPU sampler's two kernels (Triton); `worker.cuda.sampler` says what they compute.

`scan` (a program a chunk) writes each group's largest logit, and of its chunk the winner of the race where nothing is
filtered, else the masses. `draw` (a program a row) works on those where it can: a greedy row finds its group, an
unfiltered row its best chunk; `worker.cuda.sampler_filter` has the rest. Sums run in one fixed order, so a row's draw
does not depend on its neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.cuda.race import times_of, winner_of
from worker.cuda.sampler_filter import draw_filtered
from worker.cuda.sampler_layout import CHUNK_GROUPS, GROUP, NO_TOKEN, RACE_GROUPS, scale_of, sum_of


@triton.jit
def scan(
    logits, row_slots, temperatures, top_ks, top_ps, min_ps, seeds, lengths,
    group_max, group_mass, chunk_mass, chunk_score, chunk_winner, row_stride, vocab_size, num_chunks,
):  # fmt: skip
    """Write group maxima float32[rows, num_chunks * 64]; of each chunk of an unfiltered row the race's winner
    int32[rows, num_chunks] and its score float32, of filtered rows the groups' and chunks' masses.

    Scores and masses are relative to the chunk's largest logit. A chunk mass of NaN marks a NaN or +infinity.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    pointers = logits + row.to(tl.int64) * row_stride + token
    x = tl.load(pointers, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    max_g = tl.max(x, axis=1)
    tl.store(group_max + row * num_chunks * CHUNK_GROUPS + group, max_g)
    largest = tl.max(max_g, axis=0)
    num_bad = sum_of(((x != x) | (x == float("inf"))).to(tl.int32))
    slot = tl.load(row_slots + row)
    temperature = tl.load(temperatures + slot)
    mass = 0.0
    if temperature > 0:
        base = tl.where(largest == float("-inf"), 0.0, largest)
        scale = scale_of(temperature)
        if _keeps_all(tl.load(top_ks + slot), tl.load(top_ps + slot), tl.load(min_ps + slot), vocab_size):
            logits += row.to(tl.int64) * row_stride
            noise = (tl.load(seeds + slot), tl.load(lengths + slot) + 1)
            score, winner = _race_chunk(logits, chunk, base, scale, noise, vocab_size)
            tl.store(chunk_score + row * num_chunks + chunk, score)
            tl.store(chunk_winner + row * num_chunks + chunk, winner)
        else:
            mass_g = tl.sum(tl.exp2((x - base) * scale), axis=1)
            mass = tl.sum(mass_g, axis=0)
            tl.store(group_mass + row * num_chunks * CHUNK_GROUPS + group, mass_g)
    tl.store(chunk_mass + row * num_chunks + chunk, tl.where(num_bad > 0, float("nan"), mass))


@triton.jit
def _race_chunk(logits, chunk, base, scale, noise, vocab_size):
    """Best score of a chunk's tokens, and whose it is.

    In parts, which come from the cache once more: all at once would take the registers of a third program.
    """
    seed, position = noise
    best = tl.zeros((RACE_GROUPS, GROUP), tl.float32)
    winner = tl.full((RACE_GROUPS, GROUP), NO_TOKEN, tl.int32)
    for first in range(0, CHUNK_GROUPS, RACE_GROUPS):
        group = chunk * CHUNK_GROUPS + first + tl.arange(0, RACE_GROUPS)
        token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
        score = tl.exp2((x - base) * scale) / times_of(group, seed, position)
        winner = tl.where(score > best, token, winner)
        best = tl.maximum(score, best)
    return winner_of(best, winner)


@triton.jit
def draw(
    logits, row_slots, temperatures, top_ks, top_ps, min_ps, seeds, lengths, out_tokens, bad_rows,
    group_max, group_mass, chunk_mass, chunk_score, chunk_winner, listed, cut, row_stride, vocab_size, num_chunks,
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
    is_chunk = chunks < num_chunks
    mass_c = tl.load(chunk_mass + row * num_chunks + chunks, mask=is_chunk, other=0.0)
    largest = tl.max(max_g, axis=0)
    mass = tl.sum(mass_c, axis=0)
    is_bad = (mass != mass) | (largest == float("-inf"))
    token = 0
    if is_bad:
        token = 0
    elif temperature == 0:
        token = _first_largest(logits, max_g, groups, largest, vocab_size)
    else:
        scale = scale_of(temperature)
        top_k = tl.load(top_ks + slot)
        top_p = tl.load(top_ps + slot)
        min_p = tl.load(min_ps + slot)
        max_c = tl.max(tl.reshape(max_g, (BLOCK_CHUNKS, CHUNK_GROUPS)), axis=1)
        factor_c = tl.exp2((max_c - largest) * scale)
        if _keeps_all(top_k, top_p, min_p, vocab_size):
            chunks += row * num_chunks
            score_c = tl.load(chunk_score + chunks, mask=is_chunk, other=0.0) * factor_c
            winner_c = tl.load(chunk_winner + chunks, mask=is_chunk, other=NO_TOKEN)
            token = tl.min(tl.where(score_c == tl.max(score_c, axis=0), winner_c, NO_TOKEN), axis=0)
        else:
            listed += row * num_groups
            row_logits = (logits, listed, largest, scale, vocab_size)
            mass_g = tl.load(group_mass + row * num_groups + groups, mask=groups < num_groups, other=0.0)
            mass_g = tl.reshape(tl.reshape(mass_g, (BLOCK_CHUNKS, CHUNK_GROUPS)) * factor_c[:, None], max_g.shape)
            mass = tl.sum(mass_c * factor_c, axis=0)
            top_k = tl.where((top_k == 0) | (top_k > vocab_size), vocab_size, top_k)
            noise = (tl.load(seeds + slot), tl.load(lengths + slot) + 1)
            token = draw_filtered(
                row_logits, max_g, mass_g, groups, mass, noise, top_k, top_p, min_p, cut + row * 2, KEY_SHIFT
            )  # fmt: skip
    tl.store(out_tokens + row, token)
    tl.store(bad_rows + row, is_bad.to(tl.int32))


@triton.jit
def _keeps_all(top_k, top_p, min_p, vocab_size):
    return ((top_k == 0) | (top_k >= vocab_size)) & (top_p >= 1) & (min_p == 0)


@triton.jit
def _first_largest(logits, max_g, groups, largest, vocab_size):
    """The lowest token whose logit is the row's largest."""
    group = tl.min(tl.where(max_g == largest, groups, NO_TOKEN), axis=0)
    token = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.min(tl.where(x == largest, token, NO_TOKEN), axis=0)

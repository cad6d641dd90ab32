# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The race of `worker.race` in float32 (Triton): arrival times of a block of tokens, and the winner of a block.

Scores p / E agree with the float64 ones within a few roundings of float32; the probabilities' own rounding is larger.
"""

from __future__ import annotations

import triton
import triton.language as tl

from worker.cuda.sampler_layout import GROUP, NO_TOKEN

QUADS = tl.constexpr(16)  # calls of the generator a group: each gives the words of four tokens


@triton.jit
def times_of(group, seed, position):
    """Arrival times float32[G, GROUP] of the tokens of groups int32[G]."""
    call = (group[:, None] * QUADS + tl.arange(0, QUADS)[None, :]).to(tl.uint32)
    zero = call * 0
    w0, w1, w2, w3 = tl.philox(seed, zero + position.to(tl.uint32), call, zero, zero)
    # Joined so that a call's four words end up side by side.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return _exponential(tl.reshape(words, (group.shape[0], GROUP)))


@triton.jit
def _exponential(word):
    """-log1p(-v) of v = (word + 0.5) / 2^32, in float32 with a relative error below 1e-6.

    Below 1/8 by its series, as 1 - v would round away what is small; else by the logarithm of 1 - v, which the word's
    complement gives without loss.
    """
    v = (word.to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (1.0 / 4294967296.0)
    tail = 1 / 5 + v * (1 / 6 + v * (1 / 7 + v * (1 / 8)))
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * tail))))
    return tl.where(v < 0.125, series, -tl.log(rest))


@triton.jit
def winner_of(score, token):
    """The best of scores [G, GROUP] and its token, the lowest on ties; NO_TOKEN where none has a score above 0."""
    best = tl.max(tl.max(score, axis=1), axis=0)
    tied = tl.where((score == best) & (score > 0), token, NO_TOKEN)
    return best, tl.min(tl.min(tied, axis=1), axis=0)

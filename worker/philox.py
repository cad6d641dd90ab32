"""Philox4x32-10, a counter-based random generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", 2011), in plain torch on any device: words are a function of key and counter and of nothing else, so no state
can be lost with a worker.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

Words: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """The four random words of each counter under its key. All are 32-bit words in int64, of shapes that broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(NUM_ROUNDS):
        # A product may wrap into the sign; its 64 bits are the right ones all the same.
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32 & _LOW) ^ c1 ^ (k0 + number * KEY_STEPS[0] & _LOW),
            product1 & _LOW,
            (product0 >> 32 & _LOW) ^ c3 ^ (k1 + number * KEY_STEPS[1] & _LOW),
            product0 & _LOW,
        )
    return c0, c1, c2, c3

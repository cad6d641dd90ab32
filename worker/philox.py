"""Philox4x32-10, a counter-based random generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as
1, 2, 3", 2011): a draw is a function of (seed, position) and of nothing else, so no state can be lost with a worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


def philox4x32(counters: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Random words uint32[N, 4] for `counters` uint32[N, 4] under `keys` uint32[N, 2]."""
    c0, c1, c2, c3 = counters.astype(np.uint64).T
    k0, k1 = keys.astype(np.uint64).T
    for number in range(_NUM_ROUNDS):
        round_k0 = (k0 + np.uint64(number * _KEY_STEPS[0])) & _LOW
        round_k1 = (k1 + np.uint64(number * _KEY_STEPS[1])) & _LOW
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ round_k0,
            product1 & _LOW,
            (product0 >> _WORD) ^ c3 ^ round_k1,
            product0 & _LOW,
        )
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)


def coins(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One uniform draw in [0, 1) each, float64[N], a multiple of 2^-24.

    The key is the seed's low and high word, the counter (position, 0, 0, 0).
    """
    counters = np.zeros((len(seeds), 4), dtype=np.uint32)
    counters[:, 0] = positions
    keys = np.array([(seed & 0xFFFFFFFF, seed >> 32) for seed in seeds], dtype=np.uint32).reshape(-1, 2)
    return (philox4x32(counters, keys)[:, 0] >> np.uint32(8)) / np.float64(2**24)

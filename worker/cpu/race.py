"""The race of `worker.race` on the CPU, compiled: it takes the logarithm of a handful of tokens a row.

A time E = -log1p(-v) is at least v, so a token whose p / v is no better than the best p / E so far has lost already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.cpu.attention import use_threads_of_torch
from worker.philox import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS
from worker.race import WORDS_A_CALL, Race

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
Unsigned = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint32]
Philox = Callable[[Words, np.uint64, np.uint64, np.uint64], None]
Kernel = Callable[[Floats, Unsigned, Unsigned, Integers], None]

_SIGNATURE = "(f4[:,::1], u8[::1], u8[::1], i8[::1])"
# Tokens that get their words at once: enough for vector registers, and few enough for the nearest cache.
_BLOCK = 256
# The least uniform number that there is: a token less likely than this much of the best score has lost unseen.
_LEAST = 0.5 * 2.0**-32

_M0, _M1 = np.uint64(MULTIPLIERS[0]), np.uint64(MULTIPLIERS[1])
_STEP0, _STEP1 = np.uint64(KEY_STEPS[0]), np.uint64(KEY_STEPS[1])
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
_ZERO = np.uint64(0)


def _philox(words: Words, seed: np.uint64, position: np.uint64, first_call: np.uint64) -> None:
    """Words uint32[4, calls] of the counters from `first_call` on; see `worker.philox`."""
    for call in range(words.shape[1]):
        c0, c1, c2, c3 = position, first_call + np.uint64(call), _ZERO, _ZERO
        k0, k1 = seed & _LOW, seed >> _WORD
        for _ in range(NUM_ROUNDS):
            product0, product1 = _M0 * c0, _M1 * c2
            c0, c1 = (product1 >> _WORD) ^ c1 ^ k0, product1 & _LOW
            c2, c3 = (product0 >> _WORD) ^ c3 ^ k1, product0 & _LOW
            k0, k1 = (k0 + _STEP0) & _LOW, (k1 + _STEP1) & _LOW
        words[0, call], words[1, call] = c0, c1
        words[2, call], words[3, call] = c2, c3


# A name of the module, as numba finds what it has on disk only if the kernel closes over nothing compiled.
_compiled_philox: Philox = numba.njit(nogil=True)(_philox)


def _kernel(probabilities: Floats, seeds: Unsigned, positions: Unsigned, winners: Integers) -> None:
    num_rows, vocab_size = probabilities.shape
    for row in numba.prange(num_rows):
        chances = probabilities[row]
        words = np.empty((WORDS_A_CALL, _BLOCK // WORDS_A_CALL), dtype=np.uint32)
        best, winner = 0.0, 0
        for first in range(0, vocab_size, _BLOCK):
            end = min(first + _BLOCK, vocab_size)
            likeliest = np.float32(0)
            for token in range(first, end):
                likeliest = max(likeliest, chances[token])
            if likeliest <= best * _LEAST:
                continue
            _compiled_philox(words, seeds[row], positions[row], np.uint64(first // WORDS_A_CALL))
            for token in range(first, end):
                place = token - first
                chance = np.float64(chances[token])
                uniform = (words[place % WORDS_A_CALL, place // WORDS_A_CALL] + 0.5) * 2.0**-32
                if chance > best * uniform:
                    score = chance / -np.log1p(-uniform)
                    if score > best:
                        best, winner = score, token
        winners[row] = winner


def compile_cpu_race() -> Race:
    """Compile the race, or load it from numba's cache on disk. It takes probabilities on the CPU, rows contiguous."""
    compiled: Kernel = numba.njit(_SIGNATURE, parallel=True, nogil=True, cache=True)(_kernel)

    def race(probabilities: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
        use_threads_of_torch()
        winners = torch.empty(len(probabilities), dtype=torch.int64)
        compiled(
            probabilities.numpy(),
            np.array(seeds, dtype=np.uint64),
            np.array(positions, dtype=np.uint64),
            winners.numpy(),
        )
        return winners

    return race

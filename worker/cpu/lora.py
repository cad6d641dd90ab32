"""Adapters' products for lone rows on the CPU in float32, compiled: one pass for all rows, whatever adapter each has.

A decode of eight rows with eight adapters would be sixteen calls of torch for each matrix of the model; this is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np

from worker.cpu.decode import FAST_MATH, Floats, Integers

AddLowRank = Callable[..., None]

_SIGNATURE = "(f4[:,::1], f4[:,::1], i8[::1], f4[::1], i8[::1], i8[::1], i8[:,::1], i8[::1])"


def _add_low_rank(
    x: Floats,
    product: Floats,
    slots: Integers,
    room: Floats,
    downs: Integers,
    ups: Integers,
    ranks: Integers,
    outputs: Integers,
) -> None:
    """Add to each row of `product` [T, N] what its slot's matrices make of its row of `x` [T, K].

    `slots` int64[T], below 0 for none. In `room`, flat, slot s has at `downs[s]` its [R, K], and at `ups[s]` one after
    the other, for each part p, the transposed [ranks[s, p], outputs[p]], where R is the sum of its ranks.
    """
    num_inputs = x.shape[1]
    for row in numba.prange(len(slots)):
        slot = slots[row]
        if slot >= 0:
            down, up, first = downs[slot], ups[slot], 0
            for part in range(len(outputs)):
                num_outputs = outputs[part]
                for _ in range(ranks[slot, part]):
                    narrow = np.float32(0)
                    matrix = room[down : down + num_inputs]
                    for k in range(num_inputs):
                        narrow += matrix[k] * x[row, k]
                    column = room[up : up + num_outputs]
                    grown = product[row, first : first + num_outputs]
                    for n in range(num_outputs):
                        grown[n] += narrow * column[n]
                    down += num_inputs
                    up += num_outputs
                first += num_outputs


def compile_add_low_rank(*, parallel: bool) -> AddLowRank:
    """Compile it, or load it from numba's cache on disk. `parallel`: rows are shared out among threads."""
    compiled: AddLowRank = numba.njit(_SIGNATURE, parallel=parallel, nogil=True, cache=True, fastmath=FAST_MATH)(
        _add_low_rank
    )
    return compiled

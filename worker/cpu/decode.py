"""Passes of a decode on the CPU in float32, compiled: one for all that lies between two matrix products.

A decode of few rows is so short that calls of torch show: of a 135M model's step of one row they were half. Products
are in `worker.cpu.linear`. `models.decoder` does the same in plain torch, and is what these are compared with.
"""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
_ONE = np.float32(1)
_LEAST_EXPONENT = np.float32(-87)
_LOG2_E = np.float32(1.44269504)
_LOG_2_HIGH, _LOG_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
AddNorm = Callable[[Floats, Floats, Floats, float, Floats], None]
RotateAttend = Callable[..., None]

# The order of sums is free. NaN and infinity must come through, so that a failed forward is seen.
FAST_MATH = {"reassoc", "contract", "arcp", "nsz"}
_ADD_NORM = "(f4[:,::1], f4[:,::1], f4[::1], f4, f4[:,::1])"
_ROTATE_ATTEND = (
    "(f4[:,:,::1], f4[::1], f4[::1], f4, f4[:,::1], f4[:,::1], i8[::1],"
    " f4[:,:,::1], f4[:,:,::1], i8[::1], i8[::1], i8[::1], f4[:,:,::1])"
)


def _add_norm(hidden: Floats, delta: Floats, weight: Floats, eps: float, normed: Floats) -> None:
    """`hidden` [T, E] += `delta` [T, E]; `normed` [T, E] is its root mean square normalisation, times `weight` [E]."""
    num_rows, size = hidden.shape
    for row in range(num_rows):
        squares = np.float32(0)
        for i in range(size):
            value = hidden[row, i] + delta[row, i]
            hidden[row, i] = value
            squares += value * value
        scale = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
        for i in range(size):
            normed[row, i] = hidden[row, i] * scale * weight[i]


add_norm: AddNorm = numba.njit(_ADD_NORM, nogil=True, cache=True, fastmath=FAST_MATH)(_add_norm)


@numba.njit(nogil=True, fastmath=FAST_MATH)
def rotated(head: Floats, norm: Floats, eps: float, cos: Floats, sin: Floats, scale: np.float32, out: Floats) -> None:
    """`head` [D] normalised with `norm` [D] (or [0]: not at all), turned by `cos` and `sin` [D / 2], times `scale`."""
    half = len(head) // 2
    if len(norm) > 0:
        squares = np.float32(0)
        for d in range(2 * half):
            squares += head[d] * head[d]
        scale = scale / np.sqrt(squares / np.float32(2 * half) + eps)
    for d in range(half):
        low, high = head[d] * scale, head[d + half] * scale
        if len(norm) > 0:
            low, high = low * norm[d], high * norm[d + half]
        out[d] = low * cos[d] - high * sin[d]
        out[d + half] = high * cos[d] + low * sin[d]


@numba.njit(nogil=True, fastmath=FAST_MATH)
def exp_of_negative(x: np.float32) -> np.float32:
    """exp(x) within 3e-7 of it for x in [-87, 0]; for less, some 1e-38. What is not a number comes through.

    Unlike a call of the C library, a loop over this becomes vectors. The method and the polynomial are those of Cephes
    (Moshier 1992, `expf`): x = n * log(2) + r, and exp(r) by a polynomial.
    """
    x = _LEAST_EXPONENT if x < _LEAST_EXPONENT else x
    n = np.floor(x * _LOG2_E + np.float32(0.5))
    r = x - n * _LOG_2_HIGH - n * _LOG_2_LOW
    series = np.float32(1.9875691500e-4)
    series = series * r + np.float32(1.3981999507e-3)
    series = series * r + np.float32(8.3334519073e-3)
    series = series * r + np.float32(4.1665795894e-2)
    series = series * r + np.float32(1.6666665459e-1)
    series = series * r + np.float32(5.0000001201e-1)
    power: np.float32 = np.int32((np.int32(n) + 127) << 23).view(np.float32)
    return np.float32(series * r * r + r + _ONE) * power


@numba.njit(nogil=True, fastmath=FAST_MATH)
def to_shares(weights: Floats) -> None:
    """The softmax of each row of `weights` [G, positions]."""
    for head in range(len(weights)):
        shares = weights[head]
        largest = shares.max()
        total = np.float32(0)
        for i in range(len(shares)):
            shares[i] = exp_of_negative(shares[i] - largest)
            total += shares[i]
        shares *= _ONE / total


@numba.njit(nogil=True, fastmath=FAST_MATH)
def attend_head(scaled: Floats, keys: Floats, values: Floats, cells: Integers, kv_head: int, mixed: Floats) -> None:
    """Query heads `scaled` [G, D] of one key/value head over `cells` of `keys`, `values` [cells, J, D]; to `mixed`."""
    shared, head_dim = scaled.shape
    num_seen = len(cells)
    weights = np.empty((shared, num_seen), dtype=np.float32)
    for i in range(num_seen):
        key = keys[cells[i], kv_head]
        for g in range(shared):
            score = np.float32(0)
            for d in range(head_dim):
                score += scaled[g, d] * key[d]
            weights[g, i] = score
    to_shares(weights)
    mixed[:] = np.float32(0)
    for i in range(num_seen):
        value = values[cells[i], kv_head]
        for g in range(shared):
            weight = weights[g, i]
            for d in range(head_dim):
                mixed[g, d] += weight * value[d]


def compile_rotate_attend(head_dim: int, shared: int, *, parallel: bool) -> RotateAttend:
    """Compile (or load from numba's cache on disk) one layer's pass from a row's heads to what it attended to.

    It takes, for T rows that are each the next token of a sequence of their own: `heads` [T, H + 2J, D] as the product
    gives them (queries, keys, values); `query_norm`, `key_norm` [D] (or [0]: the model has none) and their eps; `cos`,
    `sin` [positions, D / 2]; `positions` int64[T]; the layer's `keys`, `values` [cells, J, D]; row t's cells
    `cells[firsts[t] : ends[t]]`, int64, the last of them its own; and writes its own cell and `mixed` [T, H, D].
    """
    scale = np.float32(head_dim**-0.5)

    def kernel(
        heads: Floats,
        query_norm: Floats,
        key_norm: Floats,
        eps: float,
        cos: Floats,
        sin: Floats,
        positions: Integers,
        keys: Floats,
        values: Floats,
        cells: Integers,
        firsts: Integers,
        ends: Integers,
        mixed: Floats,
    ) -> None:
        num_kv_heads = keys.shape[1]
        num_heads = num_kv_heads * shared
        for task in numba.prange(len(positions) * num_kv_heads):
            row, kv_head = task // num_kv_heads, task % num_kv_heads
            position, own = positions[row], cells[ends[row] - 1]
            turned = (cos[position], sin[position])
            queries = np.empty((shared, head_dim), dtype=np.float32)
            for g in range(shared):
                rotated(heads[row, kv_head * shared + g], query_norm, eps, turned[0], turned[1], scale, queries[g])
            rotated(heads[row, num_heads + kv_head], key_norm, eps, turned[0], turned[1], _ONE, keys[own, kv_head])
            for d in range(head_dim):
                values[own, kv_head, d] = heads[row, num_heads + num_kv_heads + kv_head, d]
            seen = cells[firsts[row] : ends[row]]
            attend_head(queries, keys, values, seen, kv_head, mixed[row, kv_head * shared : (kv_head + 1) * shared])

    compiled: RotateAttend = numba.njit(_ROTATE_ATTEND, parallel=parallel, nogil=True, cache=True, fastmath=FAST_MATH)(
        kernel
    )
    return compiled

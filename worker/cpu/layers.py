"""All layers of a forward on the CPU in float32 as one compiled pass, over weights that are kept in tiles.

Every thread runs the whole pass, and in each phase takes tasks from a board (`worker.cpu.board`) for as long as there
are any. So between two products no thread returns to Python, none waits for one that has lost its core, and an
intermediate result is written in the form in which the next phase reads it.

A pass reads its arguments from a `FRAME`: addresses and sizes, as code of C would. `worker.cpu.block_forwards` fills it
and keeps alive what it points to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numba
import numpy as np

from worker.cpu.phases import attend, multiply, multiply_gated, normalise, store, turn
from worker.cpu.pointers import CompiledCode, Floats, Integers, call, compiled_code, floats, integers, pointer_to

Launch = Callable[[int, int, int, Integers], None]

_ADDRESSES = (
    *("matrices", "vectors", "pools", "window_of", "board", "beats", "hidden", "delta", "heads", "mixed"),
    *("of_hidden", "of_mixed", "of_inner", "cos", "sin", "positions", "cells", "firsts", "ends"),
)
_NUMBERS = (
    *("num_threads", "num_layers", "num_rows", "width", "num_groups", "hidden_size", "inner_size", "num_kv_heads"),
    *("shared", "head_dim", "num_pool_cells", "context", "num_cells", "num_windows", "has_head_norms", "heads_code"),
)
FRAME = np.dtype([*((name, np.int64) for name in (*_ADDRESSES, *_NUMBERS)), ("eps", np.float64)])
"""Addresses of arrays, then sizes. J, D, E, F: key/value heads, head dimension, hidden and inner size; H = J * shared.

`matrices` int64[layers, 4, 5]: for each of `MATRICES` the addresses of its code (`compile_tile`) and of its tiles, how
many these are, and the blocks and bytes of one. `vectors` int64[layers, 8]: addresses of `VECTORS`, 0 for none. `pools`
int64[layers, 2]: addresses of keys and values [num_pool_cells, J, D]. `heads_code`: where code of `compile_heads` is.

T = num_rows, and R = num_groups * width, no less. `hidden` [T, E], to which the last layer's product `delta` [R, E] is
still to be added; `heads` [R, (H + 2J)D]; `mixed` [R, HD]; and the other factors of products, `of_hidden`, `of_mixed`
and `of_inner` [num_groups, K, width] with K = E, HD, F: all float32. `delta` begins with zeros, and factors have zeros
for rows beyond T. Row t, at `positions[t]`, sees `cells[firsts[w, t] : ends[t]]`, the last of them its own, in layers
of which `window_of` int64[layers] says w; all int64. `cos`, `sin` float32[context, D / 2]. `beats` int64[1] counts
layers that are done, for whoever watches.
"""

MATRICES = ("qkv", "output", "gate_up", "down")
VECTORS = (
    *("attention_norm", "mlp_norm", "query_norm", "key_norm", "qkv_bias", "output_bias", "gate_up_bias", "down_bias"),
)
PHASES = 9
"""Of one layer."""
_NORM, _QKV, _STORE, _ATTEND, _TURN, _OUTPUT, _MLP_NORM, _GATE, _DOWN = range(PHASES)
_QKV_MATRIX, _OUTPUT_MATRIX, _GATE_MATRIX, _DOWN_MATRIX = range(len(MATRICES))
_ATTENTION_NORM, _MLP_NORM_WEIGHT, _QUERY_NORM, _KEY_NORM, _QKV_BIAS, _OUTPUT_BIAS, _GATE_BIAS, _DOWN_BIAS = range(
    len(VECTORS)
)
_frame_at = pointer_to(numba.from_dtype(FRAME))


@numba.njit(nogil=True)
def _vector(address: int, size: int) -> Floats:
    """Of `size` floats, or of none where there is no such vector."""
    return floats(address, (size if address else 0,))


def _work(address: int) -> None:
    """One thread's share of the pass over the frame at `address`."""
    frame = numba.carray(_frame_at(address), (1,))[0]  # type: ignore[attr-defined]
    size, inner_size, num_padded = frame.hidden_size, frame.inner_size, frame.num_groups * frame.width
    num_heads, head_dim = frame.num_kv_heads * frame.shared, frame.head_dim
    all_heads = num_heads + 2 * frame.num_kv_heads
    matrices = integers(frame.matrices, (frame.num_layers, 4, 5))
    vectors = integers(frame.vectors, (frame.num_layers, 8))
    pools = integers(frame.pools, (frame.num_layers, 2))
    window_of = integers(frame.window_of, (frame.num_layers,))
    board = integers(frame.board, (frame.num_layers * PHASES, 16))
    hidden = floats(frame.hidden, (frame.num_rows, size))
    delta = floats(frame.delta, (num_padded, size))
    heads = floats(frame.heads, (num_padded, all_heads * head_dim))
    by_head = heads.reshape(num_padded, all_heads, head_dim)
    mixed = floats(frame.mixed, (num_padded, num_heads * head_dim))
    of_hidden = floats(frame.of_hidden, (frame.num_groups, size, frame.width))
    of_mixed = floats(frame.of_mixed, (frame.num_groups, num_heads * head_dim, frame.width))
    of_inner = floats(frame.of_inner, (frame.num_groups, inner_size, frame.width))
    turns = (
        floats(frame.cos, (frame.context, head_dim // 2)),
        floats(frame.sin, (frame.context, head_dim // 2)),
    )
    cells = integers(frame.cells, (frame.num_cells,))
    firsts = integers(frame.firsts, (frame.num_windows, frame.num_rows))
    ends = integers(frame.ends, (frame.num_rows,))
    own_cells = cells[ends - 1]
    pool_shape = (frame.num_pool_cells, frame.num_kv_heads, head_dim)
    norm_size = head_dim if frame.has_head_norms else 0
    for layer in range(frame.num_layers):
        first, of_layer, vector = layer * PHASES, matrices[layer], vectors[layer]
        keys, values = floats(pools[layer, 0], pool_shape), floats(pools[layer, 1], pool_shape)
        norm = _vector(vector[_ATTENTION_NORM], size)
        normalise(board, first + _NORM, hidden, delta, norm, frame.eps, of_hidden)
        bias = _vector(vector[_QKV_BIAS], all_heads * head_dim)
        multiply(board, first + _QKV, frame.num_threads, of_layer[_QKV_MATRIX], bias, of_hidden, heads)
        norm = _vector(vector[_KEY_NORM], norm_size)
        store(board, first + _STORE, frame, by_head, turns, norm, keys, values, own_cells)
        norm, seen = _vector(vector[_QUERY_NORM], norm_size), (cells, firsts[window_of[layer]], ends)
        attend(board, first + _ATTEND, frame, by_head, turns, norm, keys, values, seen)
        turn(board, first + _TURN, mixed, frame.num_rows, of_mixed)
        bias = _vector(vector[_OUTPUT_BIAS], size)
        multiply(board, first + _OUTPUT, frame.num_threads, of_layer[_OUTPUT_MATRIX], bias, of_mixed, delta)
        norm = _vector(vector[_MLP_NORM_WEIGHT], size)
        normalise(board, first + _MLP_NORM, hidden, delta, norm, frame.eps, of_hidden)
        bias = _vector(vector[_GATE_BIAS], 2 * inner_size)
        multiply_gated(board, first + _GATE, frame.num_threads, of_layer[_GATE_MATRIX], bias, of_hidden, of_inner)
        bias = _vector(vector[_DOWN_BIAS], size)
        multiply(board, first + _DOWN, frame.num_threads, of_layer[_DOWN_MATRIX], bias, of_inner, delta)
        integers(frame.beats, (1,))[0] += 1


@functools.cache
def compile_layers() -> CompiledCode:
    """Compile one thread's share of a pass, or load it from numba's cache on disk. It takes the address of a frame."""
    return compiled_code(_work, 1)


def _launch(work: int, frame: int, num_threads: int, ran: Integers) -> None:
    for thread in numba.prange(num_threads):
        call(work, (frame,))
        ran[thread] = 1


def compile_launch() -> Launch:
    """Compile (or load from disk) what runs code of `compile_layers` over a frame on so many threads."""
    compiled: Launch = numba.njit("(i8, i8, i8, i8[::1])", parallel=True, nogil=True, cache=True)(_launch)
    return compiled

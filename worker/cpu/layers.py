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
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from worker.cpu.blocks import multiply_tile
from worker.cpu.board import Board, finish, take, wait
from worker.cpu.decode import FAST_MATH, exp_of_negative, rotated
from worker.cpu.pointers import CompiledCode, call, compiled_code, floats_at, integers_at, pointer_to
from worker.models.blocks import LANES

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
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
_CODE, _TILES, _NUM_TILES, _NUM_BLOCKS, _TILE_BYTES = range(5)
# Columns that are turned at once: few enough lines for the nearest cache, and whole lines of what is read.
_STRIP = 64
_ROWS_OF_A_TASK = 4
# Tasks of a product for each thread, so that a slower one gets fewer.
_SHARES = 6
_ONE = np.float32(1)


_frame_at = pointer_to(numba.from_dtype(FRAME))


@numba.njit(nogil=True)
def _floats(address: int, shape: Any) -> Floats:
    floats: Floats = numba.carray(floats_at(address), shape)  # type: ignore[attr-defined]
    return floats


@numba.njit(nogil=True)
def _integers(address: int, shape: Any) -> Integers:
    integers: Integers = numba.carray(integers_at(address), shape)  # type: ignore[attr-defined]
    return integers


@numba.njit(nogil=True)
def _vector(address: int, size: int) -> Floats:
    """Of `size` floats, or of none where there is no such vector."""
    return _floats(address, (size if address else 0,))


@numba.njit(nogil=True, fastmath=FAST_MATH)
def _norm(board: Board, phase: int, hidden: Floats, delta: Floats, weight: Floats, eps: float, columns: Floats) -> None:
    """`hidden` += `delta`; `columns` are its rows' root mean square normalisation, times `weight`."""
    num_rows, size = hidden.shape
    num_groups, _, width = columns.shape
    scales = np.empty(width, dtype=np.float32)
    group = take(board, phase)
    while group < num_groups:
        first = group * width
        some = min(width, num_rows - first)
        for row in range(some):
            values, more = hidden[first + row], delta[first + row]
            squares = np.float32(0)
            for i in range(size):
                value = values[i] + more[i]
                values[i] = value
                squares += value * value
            scales[row] = _ONE / np.sqrt(squares / np.float32(size) + eps)
        into = columns[group]
        for start in range(0, size, _STRIP):
            for row in range(some):
                values, scale = hidden[first + row], scales[row]
                for i in range(start, min(start + _STRIP, size)):
                    into[i, row] = values[i] * scale * weight[i]
        finish(board, phase)
        group = take(board, phase)
    wait(board, phase, num_groups)


@numba.njit(nogil=True)
def _turn(board: Board, phase: int, rows: Floats, num_rows: int, columns: Floats) -> None:
    """`columns` [groups, K, width] are the first rows of `rows` [R, K] side by side."""
    num_groups, size, width = columns.shape
    num_strips = (size + _STRIP - 1) // _STRIP
    task = take(board, phase)
    while task < num_groups * num_strips:
        group, start = task // num_strips, task % num_strips * _STRIP
        into = columns[group]
        for row in range(min(width, num_rows - group * width)):
            values = rows[group * width + row]
            for i in range(start, min(start + _STRIP, size)):
                into[i, row] = values[i]
        finish(board, phase)
        task = take(board, phase)
    wait(board, phase, num_groups * num_strips)


@numba.njit(nogil=True, fastmath=FAST_MATH)
def _product(
    board: Board, phase: int, num_threads: int, matrix: Integers, bias: Floats, columns: Floats, product: Floats
) -> None:
    """`product` [R, N] is the matrix times `columns`, plus `bias` [N] (or [0]: none)."""
    num_tiles = matrix[_NUM_TILES]
    grain = max(1, num_tiles // (_SHARES * num_threads))
    num_tasks = (num_tiles + grain - 1) // grain
    task = take(board, phase)
    while task < num_tasks:
        end = min((task + 1) * grain, num_tiles)
        for index in range(task * grain, end):
            tile = matrix[_TILES] + index * matrix[_TILE_BYTES]
            multiply_tile(matrix[_CODE], tile, matrix[_NUM_BLOCKS], columns, product, index * LANES)
        if len(bias) > 0:
            for row in range(len(product)):
                for i in range(task * grain * LANES, end * LANES):
                    product[row, i] += bias[i]
        finish(board, phase)
        task = take(board, phase)
    wait(board, phase, num_tasks)


@numba.njit(nogil=True, fastmath=FAST_MATH)
def _gate(
    board: Board, phase: int, num_threads: int, matrix: Integers, bias: Floats, columns: Floats, inner: Floats
) -> None:
    """`inner` [groups, F, width] is silu(gate) * up, of a matrix that has the rows of gate above those of up."""
    num_groups, size, width = inner.shape
    num_tiles = size // LANES
    grain = max(1, num_tiles // (_SHARES * num_threads))
    num_tasks = (num_tiles + grain - 1) // grain
    both = np.empty((2, num_groups * width, LANES), dtype=np.float32)
    task = take(board, phase)
    while task < num_tasks:
        for index in range(task * grain, min((task + 1) * grain, num_tiles)):
            for half in range(2):
                tile = matrix[_TILES] + (index + half * num_tiles) * matrix[_TILE_BYTES]
                multiply_tile(matrix[_CODE], tile, matrix[_NUM_BLOCKS], columns, both[half], 0)
                if len(bias) > 0:
                    first = half * size + index * LANES
                    for row in range(num_groups * width):
                        for lane in range(LANES):
                            both[half, row, lane] += bias[first + lane]
            for row in range(num_groups * width):
                for lane in range(LANES):
                    gate = both[0, row, lane]
                    power = exp_of_negative(-abs(gate))
                    share = (_ONE if gate >= np.float32(0) else power) / (_ONE + power)
                    both[0, row, lane] = gate * share * both[1, row, lane]
            for group in range(num_groups):
                into = inner[group, index * LANES : (index + 1) * LANES]
                for lane in range(LANES):
                    for row in range(width):
                        into[lane, row] = both[0, group * width + row, lane]
        finish(board, phase)
        task = take(board, phase)
    wait(board, phase, num_tasks)


@numba.njit(nogil=True, fastmath=FAST_MATH)
def _store(
    board: Board,
    phase: int,
    frame: Any,
    heads: Floats,
    turns: tuple[Floats, Floats],
    key_norm: Floats,
    keys: Floats,
    values: Floats,
    cells: Integers,
) -> None:
    """Put keys, normalised and turned, and values of `heads` [R, H + 2J, D] into their `cells` [T]."""
    positions = _integers(frame.positions, (frame.num_rows,))
    num_kv_heads, num_heads = frame.num_kv_heads, frame.num_kv_heads * frame.shared
    num_tasks = (frame.num_rows + _ROWS_OF_A_TASK - 1) // _ROWS_OF_A_TASK
    task = take(board, phase)
    while task < num_tasks:
        for row in range(task * _ROWS_OF_A_TASK, min((task + 1) * _ROWS_OF_A_TASK, frame.num_rows)):
            own, position = cells[row], positions[row]
            cos, sin = turns[0][position], turns[1][position]
            for kv_head in range(num_kv_heads):
                key, value = heads[row, num_heads + kv_head], heads[row, num_heads + num_kv_heads + kv_head]
                rotated(key, key_norm, frame.eps, cos, sin, _ONE, keys[own, kv_head])
                kept = values[own, kv_head]
                for d in range(frame.head_dim):
                    kept[d] = value[d]
        finish(board, phase)
        task = take(board, phase)
    wait(board, phase, num_tasks)


@numba.njit(nogil=True, fastmath=FAST_MATH)
def _attend(
    board: Board,
    phase: int,
    frame: Any,
    heads: Floats,
    turns: tuple[Floats, Floats],
    query_norm: Floats,
    keys: Floats,
    values: Floats,
    seen: tuple[Integers, Integers, Integers],
) -> None:
    """`mixed` is what each query head sees: the cells `seen[0][seen[1][t] : seen[2][t]]` of row t."""
    cells, firsts, ends = seen
    positions = _integers(frame.positions, (frame.num_rows,))
    num_kv_heads, shared, head_dim = frame.num_kv_heads, frame.shared, frame.head_dim
    scale = np.float32(1.0 / np.sqrt(head_dim))
    queries = np.empty((shared, head_dim), dtype=np.float32)
    weights = np.empty(shared * np.max(ends - firsts), dtype=np.float32)
    cell_size, head_bytes = num_kv_heads * head_dim, 4 * head_dim
    task = take(board, phase)
    while task < frame.num_rows * num_kv_heads:
        row, kv_head = task // num_kv_heads, task % num_kv_heads
        position = positions[row]
        for head in range(shared):
            query = heads[row, kv_head * shared + head]
            rotated(query, query_norm, frame.eps, turns[0][position], turns[1][position], scale, queries[head])
        own = cells[firsts[row] : ends[row]]
        places = (keys.ctypes.data + kv_head * head_bytes, values.ctypes.data + kv_head * head_bytes, cell_size)
        into = frame.mixed + task * shared * head_bytes
        call(frame.heads_code, (queries.ctypes.data, *places, own.ctypes.data, len(own), weights.ctypes.data, into))
        finish(board, phase)
        task = take(board, phase)
    wait(board, phase, frame.num_rows * num_kv_heads)


def _work(address: int) -> None:
    """One thread's share of the pass over the frame at `address`."""
    frame = numba.carray(_frame_at(address), (1,))[0]  # type: ignore[attr-defined]
    size, inner_size, num_padded = frame.hidden_size, frame.inner_size, frame.num_groups * frame.width
    num_heads, head_dim = frame.num_kv_heads * frame.shared, frame.head_dim
    all_heads = num_heads + 2 * frame.num_kv_heads
    matrices = _integers(frame.matrices, (frame.num_layers, 4, 5))
    vectors = _integers(frame.vectors, (frame.num_layers, 8))
    pools = _integers(frame.pools, (frame.num_layers, 2))
    window_of = _integers(frame.window_of, (frame.num_layers,))
    board = _integers(frame.board, (frame.num_layers * PHASES, 16))
    hidden = _floats(frame.hidden, (frame.num_rows, size))
    delta = _floats(frame.delta, (num_padded, size))
    heads = _floats(frame.heads, (num_padded, all_heads * head_dim))
    by_head = heads.reshape(num_padded, all_heads, head_dim)
    mixed = _floats(frame.mixed, (num_padded, num_heads * head_dim))
    of_hidden = _floats(frame.of_hidden, (frame.num_groups, size, frame.width))
    of_mixed = _floats(frame.of_mixed, (frame.num_groups, num_heads * head_dim, frame.width))
    of_inner = _floats(frame.of_inner, (frame.num_groups, inner_size, frame.width))
    turns = (
        _floats(frame.cos, (frame.context, head_dim // 2)),
        _floats(frame.sin, (frame.context, head_dim // 2)),
    )
    cells = _integers(frame.cells, (frame.num_cells,))
    firsts = _integers(frame.firsts, (frame.num_windows, frame.num_rows))
    ends = _integers(frame.ends, (frame.num_rows,))
    own_cells = cells[ends - 1]
    pool_shape = (frame.num_pool_cells, frame.num_kv_heads, head_dim)
    norm_size = head_dim if frame.has_head_norms else 0
    for layer in range(frame.num_layers):
        first, of_layer, vector = layer * PHASES, matrices[layer], vectors[layer]
        keys, values = _floats(pools[layer, 0], pool_shape), _floats(pools[layer, 1], pool_shape)
        norm = _vector(vector[_ATTENTION_NORM], size)
        _norm(board, first + _NORM, hidden, delta, norm, frame.eps, of_hidden)
        bias = _vector(vector[_QKV_BIAS], all_heads * head_dim)
        _product(board, first + _QKV, frame.num_threads, of_layer[_QKV_MATRIX], bias, of_hidden, heads)
        norm = _vector(vector[_KEY_NORM], norm_size)
        _store(board, first + _STORE, frame, by_head, turns, norm, keys, values, own_cells)
        norm, seen = _vector(vector[_QUERY_NORM], norm_size), (cells, firsts[window_of[layer]], ends)
        _attend(board, first + _ATTEND, frame, by_head, turns, norm, keys, values, seen)
        _turn(board, first + _TURN, mixed, frame.num_rows, of_mixed)
        bias = _vector(vector[_OUTPUT_BIAS], size)
        _product(board, first + _OUTPUT, frame.num_threads, of_layer[_OUTPUT_MATRIX], bias, of_mixed, delta)
        norm = _vector(vector[_MLP_NORM_WEIGHT], size)
        _norm(board, first + _MLP_NORM, hidden, delta, norm, frame.eps, of_hidden)
        bias = _vector(vector[_GATE_BIAS], 2 * inner_size)
        _gate(board, first + _GATE, frame.num_threads, of_layer[_GATE_MATRIX], bias, of_hidden, of_inner)
        bias = _vector(vector[_DOWN_BIAS], size)
        _product(board, first + _DOWN, frame.num_threads, of_layer[_DOWN_MATRIX], bias, of_inner, delta)
        _integers(frame.beats, (1,))[0] += 1


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

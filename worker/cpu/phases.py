"""The phases of a compiled pass over a layer on the CPU in float32 (`worker.cpu.layers`): what each thread does of one.

In every phase all threads take tasks from the board until none is left, and the phase is over when all are done. numba
keeps the compiled pass on disk for as long as the file of its own is the same: touch `layers.py` to try a change here.

J, D, E, F: key/value heads, head dimension, hidden and inner size; T rows, in groups of `width`; R rows with those that
fill the last group.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from worker.cpu.blocks import multiply_tile
from worker.cpu.board import Board, finish, take, wait
from worker.cpu.decode import FAST_MATH, exp_of_negative, rotated
from worker.cpu.pointers import Floats, Integers, call, integers
from worker.models.blocks import LANES

# Of one matrix, as `worker.cpu.layers.FRAME` has them.
_CODE, _TILES, _NUM_TILES, _NUM_BLOCKS, _TILE_BYTES = range(5)
# Columns that are turned at once: few enough lines for the nearest cache, and whole lines of what is read.
_STRIP = 64
_ROWS_OF_A_TASK = 4
# Tasks of a product for each thread, so that a slower one gets fewer.
_SHARES = 6
_ONE = np.float32(1)


@numba.njit(nogil=True, fastmath=FAST_MATH)
def normalise(
    board: Board, phase: int, hidden: Floats, delta: Floats, weight: Floats, eps: float, columns: Floats
) -> None:
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
def turn(board: Board, phase: int, rows: Floats, num_rows: int, columns: Floats) -> None:
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
def multiply(
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
def multiply_gated(
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
def store(
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
    positions = integers(frame.positions, (frame.num_rows,))
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
def attend(
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
    positions = integers(frame.positions, (frame.num_rows,))
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

"""Products on the CPU in float32 with a matrix that is kept in tiles of blocks (`worker.models.blocks`), compiled.

A decode reads each weight once, so fewer bytes are less time: 0.75 of a byte for a weight of four bits and its share of
scale and offset, instead of four. A tile's sixteen rows are the lanes of a vector, so a weight's value, scale * code +
offset, is made where it is used, once for up to sixteen rows of the other factor, and never stored.

numba compiles what is here; the innermost part is written in LLVM's own vectors (`_multiply_tile`), because loops over
codes of four bits are not something that its vectoriser sees through. LLVM splits the vectors where a processor's
registers are narrower. In assembly a weight of 16 rows is one conversion and one multiplication, then one
multiplication and addition for each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from worker.cpu.attention import use_threads_of_torch
from worker.cpu.pointers import CompiledCode, call, compiled_code
from worker.cpu.vectors import (
    BYTE,
    BYTES,
    FLOAT,
    FLOATS,
    INDEX,
    INTS,
    cgutils,
    multiply_add,
    number,
    prefetch,
    spread,
    zeroed,
)
from worker.models.blocks import CHUNK, LANES, BlockLayout, Bytes, Floats, Tiles

Product = Callable[[int, Bytes, Floats, Floats, Floats], None]

WIDTHS = (1, 4, 8, 16)
"""Rows that are multiplied at once: each width is code of its own, whose sums stay in registers."""
_SIGNATURE = "(i8, u1[:,:,::1], f4[:,::1], f4[:,:,::1], f4[:,::1])"
# Sums of which each takes every so manyth column: with one row alone, each addition would wait for the one before.
_LEAST_SUMS = 4
_LINE_BYTES = 64
# How far ahead of the arithmetic tiles are fetched: what comes from memory in the time of a few blocks.
_AHEAD_BYTES = 2048


def _load(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """A vector from `offset` bytes behind `base`; nothing is said about where it may begin."""
    pointer = builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())
    return builder.load(pointer, align=4 if kind is not BYTES else 1)


def _codes(builder: Any, chunk: Any, column: int, bits: int) -> Any:
    """Codes of column `column` of a chunk, as integers of 32 bits."""
    if bits == 8:
        stored = _load(builder, chunk, number(column * LANES), BYTES)
        return builder.sext(stored, INTS)
    words = _load(builder, chunk, number(0), INTS)
    shifted = builder.lshr(words, ir.Constant(INTS, [bits * column] * LANES))
    return builder.and_(shifted, ir.Constant(INTS, [2**bits - 1] * LANES))


class _TileWriter:
    """Writes the code of `_tile_code`, of whose arguments the first five are `arguments`."""

    def __init__(self, builder: Any, arguments: Any, form: BlockLayout, num_rows: int) -> None:
        self._builder = builder
        self._form = form
        self._num_rows = num_rows
        self._tile = builder.inttoptr(arguments[0], BYTE.as_pointer())
        self._num_blocks, self._stride = arguments[1], arguments[4]
        self._columns, self._product = (builder.inttoptr(address, FLOAT.as_pointer()) for address in arguments[2:4])
        num_sums = max(1, _LEAST_SUMS // num_rows)
        self._sums = [zeroed(builder, num_sums) for _ in range(num_rows)]

    def write(self) -> None:
        builder = self._builder
        with cgutils.for_range(builder, self._num_blocks, intp=INDEX) as blocks:
            self._add_block(blocks.index)
        for row, sums in enumerate(self._sums):
            total = functools.reduce(builder.fadd, [builder.load(place) for place in sums])
            start = builder.gep(self._product, [builder.mul(self._stride, number(row))])
            builder.store(total, builder.bitcast(start, FLOATS.as_pointer()), align=4)

    def _add_block(self, index: Any) -> None:
        builder, form = self._builder, self._form
        block = builder.gep(self._tile, [builder.mul(index, number(form.tile_bytes))])
        scale = _load(builder, block, number(form.code_bytes), FLOATS)
        behind = number(form.code_bytes + 4 * LANES)
        offset = _load(builder, block, behind, FLOATS) if form.has_offsets else None
        for line in range(0, form.tile_bytes, _LINE_BYTES):
            prefetch(builder, builder.gep(block, [number(line + _AHEAD_BYTES)]))
        first = builder.mul(index, number(form.size * self._num_rows))
        with cgutils.for_range(builder, number(form.size // CHUNK), intp=INDEX) as chunks:
            chunk_bytes = CHUNK * LANES * form.bits // 8
            chunk = builder.gep(block, [builder.mul(chunks.index, number(chunk_bytes))])
            of_chunk = builder.mul(chunks.index, number(CHUNK * self._num_rows))
            others = builder.gep(self._columns, [builder.add(first, of_chunk)])
            for column in range(CHUNK):
                codes = builder.sitofp(_codes(builder, chunk, column, form.bits), FLOATS)
                weights = builder.fmul(codes, scale) if offset is None else multiply_add(builder, codes, scale, offset)
                self._add_column(column, weights, others)

    def _add_column(self, column: int, weights: Any, others: Any) -> None:
        """`weights`: of column `column` of a chunk; `others`: where the other factor's rows of the chunk begin."""
        builder = self._builder
        for row, sums in enumerate(self._sums):
            other = builder.load(builder.gep(others, [number(column * self._num_rows + row)]))
            place = sums[column % len(sums)]
            builder.store(multiply_add(builder, spread(builder, other), weights, builder.load(place)), place)


def _tile_code(
    typing_context: Any,
    tile: Any,
    num_blocks: Any,
    columns: Any,
    product: Any,
    stride: Any,
    width: Any,
    bits: Any,
    size: Any,
    has_offsets: Any,
) -> Any:
    """Code that writes `width` rows of LANES products, `stride` floats apart, from address `product` on.

    At address `tile` uint8[num_blocks, tile_bytes]; at `columns` float32[K, width]: the other factor. The last four
    arguments are constants of that code. This is called with their numba types, and gives what numba asks of an
    intrinsic.
    """
    constants = (width, bits, size, has_offsets)
    if not all(isinstance(constant, types.IntegerLiteral) for constant in constants):
        return None  # numba asks again with the constants' values
    form = BlockLayout(bits.literal_value, size.literal_value, bool(has_offsets.literal_value))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _TileWriter(builder, arguments, form, width.literal_value).write()
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5, *constants), generate


_multiply_tile: Any = intrinsic(_tile_code)


@numba.njit(nogil=True)
def _to_columns(x: Floats, columns: Floats) -> None:
    """`columns` [groups, K, width]: the rows of `x` [T, K] side by side, and zeros for those that there are not."""
    num_rows, size = x.shape
    width = columns.shape[2]
    for group in range(len(columns)):
        some = min(width, num_rows - group * width)
        rows, into = x[group * width : group * width + some], columns[group]
        for k in range(size):
            for row in range(some):
                into[k, row] = rows[row, k]
            for row in range(some, width):
                into[k, row] = np.float32(0)


@functools.cache
def compile_tile(layout: BlockLayout, width: int) -> CompiledCode:
    """Compile products of one tile and `width` rows, or load them from numba's cache on disk.

    The code takes the address of a tile and its number of blocks, the address of the other factor's columns
    [K, width], and where to write: an address and how many floats rows are apart.
    """
    bits, size, has_offsets = layout.bits, layout.size, int(layout.has_offsets)

    def multiply(tile: int, num_blocks: int, columns: int, product: int, stride: int) -> None:
        _multiply_tile(tile, num_blocks, columns, product, stride, width, bits, size, has_offsets)

    return compiled_code(multiply, 5)


@numba.njit(nogil=True)
def multiply_tile(code: int, tile: int, num_blocks: int, columns: Floats, product: Floats, lane: int) -> None:
    """Write LANES columns of `product` [groups * width, N] from `lane` on: a tile, and `columns` [groups, K, width]."""
    num_groups, size, width = columns.shape
    stride = product.shape[1]
    for group in range(num_groups):
        into = product.ctypes.data + 4 * (group * width * stride + lane)
        call(code, (tile, num_blocks, columns.ctypes.data + 4 * group * size * width, into, stride))


def _product(code: int, tiles: Bytes, x: Floats, columns: Floats, product: Floats) -> None:
    _to_columns(x, columns)
    num_blocks = tiles.shape[1]
    for index in numba.prange(len(tiles)):
        multiply_tile(code, tiles[index].ctypes.data, num_blocks, columns, product, index * LANES)


@functools.cache
def compile_product() -> Product:
    """Compile (or load from numba's cache on disk) products with matrices in tiles.

    It takes the address of code of `compile_tile`, `tiles` uint8[tiles, blocks, tile_bytes], `x` [T, K], room for
    `columns` [groups, K, width], where width is `width_for(T)`, and writes `product` [groups * width, LANES * tiles].
    """
    compiled: Product = numba.njit(_SIGNATURE, parallel=True, nogil=True, cache=True)(_product)
    return compiled


def width_for(num_rows: int) -> int:
    return next((width for width in WIDTHS if num_rows <= width), WIDTHS[-1])


def prepare_products(layout: BlockLayout) -> None:
    """Compile all that `product` needs for matrices of `layout`, so that none is the first to wait for it."""
    compile_product()
    for width in WIDTHS:
        compile_tile(layout, width)


def product(x: Tensor, tiles: Tiles, bias: Tensor | None) -> Tensor:
    """`x` float32[T, K] times the matrix [N, K], transposed, plus `bias` [N]. Returns [T, N]."""
    num_rows, size = x.shape
    width = width_for(num_rows)
    num_groups = -(-num_rows // width)
    padded = np.empty((num_groups * width, len(tiles.data) * LANES), dtype=np.float32)
    columns = np.empty((num_groups, size, width), dtype=np.float32)
    use_threads_of_torch()
    code = compile_tile(tiles.layout, width).address
    compile_product()(code, tiles.data, x.contiguous().numpy(), columns, padded)
    result = torch.from_numpy(padded)[:num_rows, : tiles.num_rows]
    return result if bias is None else result + bias

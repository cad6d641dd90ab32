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
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic
from torch import Tensor

from worker.cpu.attention import use_threads_of_torch
from worker.cpu.pointers import CompiledCode, call, compiled_code
from worker.models.blocks import CHUNK, LANES, BlockLayout, Bytes, Floats, Tiles

Product = Callable[[int, Bytes, Floats, Floats, Floats], None]
cgutils: Any = numba_cgutils  # without types

WIDTHS = (1, 4, 8, 16)
"""Rows that are multiplied at once: each width is code of its own, whose sums stay in registers."""
_SIGNATURE = "(i8, u1[:,:,::1], f4[:,::1], f4[:,:,::1], f4[:,::1])"
_FLOAT, _INT, _BYTE, _INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(64)
_FLOATS, _INTS, _BYTES = (ir.VectorType(element, LANES) for element in (_FLOAT, _INT, _BYTE))
# Sums of which each takes every so manyth column: with one row alone, each addition would wait for the one before.
_LEAST_SUMS = 4
_LINE_BYTES = 64
# How far ahead of the arithmetic tiles are fetched: what comes from memory in the time of a few blocks.
_AHEAD_BYTES = 2048


def _load(builder: Any, base: Any, offset: Any, kind: Any) -> Any:
    """A vector from `offset` bytes behind `base`; nothing is said about where it may begin."""
    pointer = builder.bitcast(builder.gep(base, [offset]), kind.as_pointer())
    return builder.load(pointer, align=4 if kind is not _BYTES else 1)


def spread(builder: Any, scalar: Any) -> Any:
    """`scalar` in all lanes."""
    none = ir.Constant(_FLOATS, ir.Undefined)
    first = builder.insert_element(none, scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(first, none, ir.Constant(_INTS, [0] * LANES))


def _codes(builder: Any, chunk: Any, column: int, bits: int) -> Any:
    """Codes of column `column` of a chunk, as integers of 32 bits."""
    if bits == 8:
        stored = _load(builder, chunk, ir.Constant(_INDEX, column * LANES), _BYTES)
        return builder.sext(stored, _INTS)
    words = _load(builder, chunk, ir.Constant(_INDEX, 0), _INTS)
    shifted = builder.lshr(words, ir.Constant(_INTS, [bits * column] * LANES))
    return builder.and_(shifted, ir.Constant(_INTS, [2**bits - 1] * LANES))


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
    num_rows: int = width.literal_value
    form = BlockLayout(bits.literal_value, size.literal_value, bool(has_offsets.literal_value))
    num_sums = max(1, _LEAST_SUMS // num_rows)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base = builder.inttoptr(arguments[0], _BYTE.as_pointer())
        factor, written = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in arguments[2:4])
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_FLOATS, [_FLOATS] * 3), f"llvm.fma.v{LANES}f32"
        )
        prefetch = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT]), "llvm.prefetch.p0"
        )
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        sums = [[cgutils.alloca_once(builder, _FLOATS) for _ in range(num_sums)] for _ in range(num_rows)]
        for place in (place for of_row in sums for place in of_row):
            builder.store(zero, place)
        with cgutils.for_range(builder, arguments[1], intp=_INDEX) as blocks:
            block = builder.gep(base, [builder.mul(blocks.index, ir.Constant(_INDEX, form.tile_bytes))])
            scale = _load(builder, block, ir.Constant(_INDEX, form.code_bytes), _FLOATS)
            behind = ir.Constant(_INDEX, form.code_bytes + 4 * LANES)
            offset = _load(builder, block, behind, _FLOATS) if form.has_offsets else None
            for line in range(0, form.tile_bytes, _LINE_BYTES):
                ahead = builder.gep(block, [ir.Constant(_INDEX, line + _AHEAD_BYTES)])
                builder.call(prefetch, [ahead, *(ir.Constant(_INT, option) for option in (0, 3, 1))])
            first = builder.mul(blocks.index, ir.Constant(_INDEX, form.size * num_rows))
            with cgutils.for_range(builder, ir.Constant(_INDEX, form.size // CHUNK), intp=_INDEX) as chunks:
                chunk_bytes = CHUNK * LANES * form.bits // 8
                chunk = builder.gep(block, [builder.mul(chunks.index, ir.Constant(_INDEX, chunk_bytes))])
                of_chunk = builder.mul(chunks.index, ir.Constant(_INDEX, CHUNK * num_rows))
                others = builder.gep(factor, [builder.add(first, of_chunk)])
                for column in range(CHUNK):
                    codes = builder.sitofp(_codes(builder, chunk, column, form.bits), _FLOATS)
                    weights = (
                        builder.fmul(codes, scale) if offset is None else builder.call(fma, [codes, scale, offset])
                    )
                    for row in range(num_rows):
                        other = builder.load(builder.gep(others, [ir.Constant(_INDEX, column * num_rows + row)]))
                        place = sums[row][column % num_sums]
                        total = builder.call(fma, [spread(builder, other), weights, builder.load(place)])
                        builder.store(total, place)
        for row in range(num_rows):
            total = functools.reduce(builder.fadd, [builder.load(place) for place in sums[row]])
            start = builder.gep(written, [builder.mul(arguments[4], ir.Constant(_INDEX, row))])
            builder.store(total, builder.bitcast(start, _FLOATS.as_pointer()), align=4)
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

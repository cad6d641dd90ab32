"""How products with packed matrices are cut: the one table for all who launch them. Pure and in integers.

Weights are the tensor cores' 64-row operand. Sizes follow from instructions a weight and bytes in flight, counted in
what the compiler makes of them (`docs/gpu_decode_notes.md`); `benchmarks/packed_products.py` times others beside them.
"""

from __future__ import annotations

from dataclasses import replace

from worker.cuda.decode_shape import DecodeShape
from worker.cuda.tiles import GemvTile, GemvTiles, LinearTile, LinearTiles

HEAD_BITS = 8
"""Of the LM head, whatever the layers have: its numbers are what answers are drawn from."""

MOST_ROWS = 256
"""More of them are multiplied by the vendor's library, with a matrix unpacked for it."""

_LEAST_DEPTH = 64
_MULTIPROCESSORS = 132
# Several programs hide each other's waits. A product has too few columns for them, so that K is cut; the more rows, the
# more it costs to sum the parts, and the less there is to hide.
_PROGRAMS = {16: 3 * _MULTIPROCESSORS, 32: 3 * _MULTIPROCESSORS, 64: 2 * _MULTIPROCESSORS}
_MAX_SPLITS = 8
_ROW_COLUMNS = 8
_DEEP = 8192


def product_tile(bits: int, num_rows: int, num_columns: int, depth: int) -> LinearTile | None:
    """How so many rows are multiplied with a matrix [num_columns, depth]; None where the kernel does not take them."""
    wide = _tile(bits, num_rows, num_columns, depth, 128) or _tile(bits, num_rows, num_columns, depth, 64)
    if wide is None:
        return None
    splits, programs = 1, num_columns // wide.columns * -(-num_rows // wide.rows)
    while programs * splits < _PROGRAMS[wide.rows] and splits < _MAX_SPLITS and depth % (2 * splits * wide.depth) == 0:
        splits *= 2
    return replace(wide, splits=splits)


def gate_up_tile(bits: int, num_rows: int, ffn: int, depth: int) -> LinearTile | None:
    """The same for gate and up, of which a program has `columns` each. They are many and K cannot be cut, so that 64
    in all make an even load; but every program reads all rows, which many rows make dear."""
    both = _tile(bits, num_rows, 2 * ffn, depth, 128 if num_rows > 32 and ffn % 64 == 0 else 64)
    return None if both is None or ffn % (both.columns // 2) else replace(both, columns=both.columns // 2)


def _tile(bits: int, num_rows: int, num_columns: int, depth: int, columns: int) -> LinearTile | None:
    """With K in one part. No tile has 128 rows: on a GPU such ones gave wrong sums wherever K took several steps,
    before these waited for their products (`packed_codes.finished`), and nobody has tried them since."""
    if not 0 < num_rows <= MOST_ROWS or num_columns % columns:
        return None
    rows = next((rows for rows in (16, 32) if num_rows <= rows), 64)
    deepest = 256 if bits == 4 and columns == 64 else 128
    step, stages = min(deepest, depth & -depth), 3 if rows == 64 else 4
    return None if step < _LEAST_DEPTH else LinearTile(rows, columns, step, 1, stages, warps=4, swap=True)


def head_tile(num_rows: int, num_tokens: int, depth: int) -> LinearTile | None:
    """Of an LM head, whose last program may have fewer columns than others."""
    return _tile(HEAD_BITS, num_rows, -(-num_tokens // 128) * 128, depth, 128)


def packed_linear_tiles(
    shape: DecodeShape, bits: int, width: int, *, whole_gate_up: bool = False
) -> LinearTiles | None:
    """With `whole_gate_up` gate and up are a product like others, but for K, which is not cut."""
    qkv = product_tile(bits, width, shape.qkv_columns, shape.hidden)
    o = product_tile(bits, width, shape.hidden, shape.query_columns)
    gate_up = gate_up_tile(bits, width, shape.ffn, shape.hidden)
    down = product_tile(bits, width, shape.hidden, shape.ffn)
    whole = product_tile(bits, width, 2 * shape.ffn, shape.hidden)
    head = head_tile(width, shape.vocab_size, shape.hidden)
    if qkv is None or o is None or gate_up is None or down is None or whole is None or head is None:
        return None
    return LinearTiles(qkv, o, replace(whole, splits=1) if whole_gate_up else gate_up, down, head)


def packed_gemv_tiles(shape: DecodeShape, bits: int) -> GemvTiles | None:
    if shape.vocab_size < _ROW_COLUMNS:
        return None
    qkv = gemv_tile(bits, shape.qkv_columns, shape.hidden)
    o = gemv_tile(bits, shape.hidden, shape.query_columns)
    gate_up = gate_up_gemv_tile(bits, shape.ffn, shape.hidden)
    down = gemv_tile(bits, shape.hidden, shape.ffn)
    head = gemv_tile(HEAD_BITS, -(-shape.vocab_size // _ROW_COLUMNS) * _ROW_COLUMNS, shape.hidden)
    if qkv is None or o is None or gate_up is None or down is None or head is None:
        return None
    o, gate_up, down = (replace(each, early=True) for each in (o, gate_up, down))
    return GemvTiles(replace(qkv, early=bits == 4), o, gate_up, down, head)


def gemv_tile(bits: int, num_columns: int, depth: int) -> GemvTile | None:
    """How one row is multiplied with a matrix [num_columns, depth]: 8 columns share what is made of x, and there are
    as many warps as read 2,048 of each column at once, 16 bytes a thread, or four where columns are long."""
    most_warps = 4 if depth > _DEEP else bits // 2
    return None if num_columns % _ROW_COLUMNS else _gemv_tile(bits, depth, _ROW_COLUMNS, most_warps)


def gate_up_gemv_tile(bits: int, ffn: int, depth: int) -> GemvTile | None:
    """The same for gate and up, of which a program has 4 columns each: so many programs that more warps of each are
    better, which then have fewer registers."""
    half = _ROW_COLUMNS // 2
    return None if ffn % half else _gemv_tile(bits, depth, half, 4)


def _gemv_tile(bits: int, depth: int, columns: int, most_warps: int) -> GemvTile:
    """With the most warps that compute at most a quarter more than there is: K comes in whole steps."""
    of_a_warp, warps = 32 * 128 // bits, most_warps
    while warps > 1 and 4 * -(-depth // (warps * of_a_warp)) * warps * of_a_warp > 5 * depth:
        warps //= 2
    return GemvTile(columns, warps * of_a_warp, warps)

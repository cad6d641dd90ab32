"""How products of 65 to 128 rows with large matrices are cut (`worker.cuda.bulk_linear`). Pure and in integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker.cuda.decode_shape import DecodeShape
from worker.cuda.tiles import LinearTile, LinearTiles

MOST_ROWS: Final = 128

# K is cut into parts until there are so many programs; with more, their sums cost more than idle multiprocessors.
_PROGRAMS: Final = 96
_MAX_SPLITS: Final = 8
_NARROW: Final = LinearTile(128, 64, 128, 1, 4, 8, swap=False, bulk=True)
_LOW: Final = LinearTile(64, 128, 64, 1, 8, 4, swap=False, bulk=True)
_OF_EITHER: Final = LinearTile(128, 128, 64, 1, 4, 8, swap=False, bulk=True)


def bulk_linear_tiles(shape: DecodeShape, width: int, head: LinearTile) -> LinearTiles | None:
    """None where a matrix has no whole tiles. `head` is not bulk. A program of gate and up has as many columns of
    either."""
    qkv = _cut(_NARROW, width, shape.qkv_columns, shape.hidden)
    o = _cut(_NARROW, width, shape.hidden, shape.query_columns)
    down = _cut(_LOW, width, shape.hidden, shape.ffn)
    gate_up = _OF_EITHER if _OF_EITHER.divides(shape.ffn, shape.hidden) else None
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    return LinearTiles(qkv, o, gate_up, down, head)


def _cut(tile: LinearTile, width: int, num_columns: int, depth: int) -> LinearTile | None:
    if not tile.divides(num_columns, depth):
        return None
    programs, splits = num_columns // tile.columns * -(-width // tile.rows), 1
    while programs * splits < _PROGRAMS and splits < _MAX_SPLITS and depth % (2 * splits * tile.depth) == 0:
        splits *= 2
    return replace(tile, splits=splits)

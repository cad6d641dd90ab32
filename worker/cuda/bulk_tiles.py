"""How products of 65 to 256 rows with large matrices are cut (`worker.cuda.bulk_linear`). Pure and in integers."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from worker.cuda.decode_shape import DecodeShape
from worker.cuda.tiles import LinearTile, LinearTiles

# K is cut into parts until there are so many programs; with more the parts' sums cost more than idle multiprocessors.
_PROGRAMS: Final = 96
_MAX_SPLITS: Final = 8
_AHEAD: Final = 128


def bulk_linear_tiles(shape: DecodeShape, width: int) -> LinearTiles | None:
    """None where a matrix has no whole tiles."""
    tall = LinearTile(128, 128, 64, 1, 6, 8, swap=False, bulk=True)
    pair = LinearTile(128, 128, 64, 1, 4, 8, swap=False, bulk=True)  # of gate and up: twice as many columns
    if width <= 128:
        low = LinearTile(64, 128, 64, 1, 8, 4, swap=False, bulk=True)
        narrow = LinearTile(128, 64, 128, 1, 4, 8, swap=False, bulk=True)
        qkv, o, down = low, narrow, low
    else:
        qkv = o = down = tall
    tiles = (
        _cut(qkv, width, shape.qkv_columns, shape.hidden),
        _cut(o, width, shape.hidden, shape.query_columns),
        pair,
        _cut(down, width, shape.hidden, shape.ffn),
    )
    sizes = (
        (shape.qkv_columns, shape.hidden), (shape.hidden, shape.query_columns), (shape.ffn, shape.hidden),
        (shape.hidden, shape.ffn),
    )  # fmt: skip
    if not all(tile.divides(*size) for tile, size in zip(tiles, sizes, strict=True)) or shape.hidden % tall.depth:
        return None
    return LinearTiles(*tiles, head=tall)


def _cut(tile: LinearTile, width: int, num_columns: int, depth: int) -> LinearTile:
    programs, splits = num_columns // tile.columns * -(-width // tile.rows), 1
    while programs * splits < _PROGRAMS and splits < _MAX_SPLITS and depth % (2 * splits * tile.depth) == 0:
        splits *= 2
    return replace(tile, splits=splits, ahead=_AHEAD)

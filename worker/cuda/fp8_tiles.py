"""How products of fp8 are cut: a small table by number of rows and linear, and how an entry fits a matrix.

Pure and in integers; depths are in numbers of one byte. `python -m benchmarks.step_tiles` tries other entries inside a
whole step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from worker.cuda.decode_shape import DecodeShape
from worker.cuda.tiles import LinearTile, LinearTiles

_LEAST_DEPTH = 32
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """A `LinearTile` for any matrix: K is cut into parts until there are so many `programs`, and halves of `depth` are
    taken where the matrix wants it."""

    columns: int
    depth: int
    stages: int
    warps: int
    programs: int
    swap: bool = True
    ahead: int = 0


# About two for each multiprocessor, of about 100 KB in flight each, so that bytes come while products are made.
_TWO_EACH: Final = 256
TABLE: Final[Mapping[int, Mapping[str, Fp8Tile]]] = {
    16: {
        "qkv": Fp8Tile(64, 256, 4, 4, 192),
        "o": Fp8Tile(64, 256, 4, 4, _TWO_EACH),
        "gate_up": Fp8Tile(64, 256, 3, 4, 1),
        "down": Fp8Tile(64, 256, 4, 4, _TWO_EACH),
    },
    32: {
        "qkv": Fp8Tile(64, 256, 4, 4, 192),
        "o": Fp8Tile(64, 256, 4, 4, _TWO_EACH),
        "gate_up": Fp8Tile(64, 128, 5, 4, 1),
        "down": Fp8Tile(64, 256, 4, 4, _TWO_EACH),
    },
    64: {
        "qkv": Fp8Tile(64, 128, 6, 4, 192, swap=False),
        "o": Fp8Tile(64, 128, 6, 4, _TWO_EACH, swap=False),
        "gate_up": Fp8Tile(64, 128, 4, 4, 1, swap=False),
        "down": Fp8Tile(64, 128, 6, 4, _TWO_EACH, swap=False),
    },
    128: {
        "qkv": Fp8Tile(64, 128, 4, 8, 192, swap=False),
        "o": Fp8Tile(64, 128, 4, 8, _TWO_EACH, swap=False),
        "gate_up": Fp8Tile(64, 128, 3, 8, 1, swap=False),
        "down": Fp8Tile(64, 128, 4, 8, _TWO_EACH, swap=False),
    },
}
"""By most rows of a tile, and by linear. More rows than that of the last are several tiles of it."""


def fitted(name: str, num_rows: int, num_columns: int, depth: int) -> LinearTile | None:
    """How so many rows are multiplied with the linear's matrix [num_columns, depth]; None where no entry fits it."""
    rows = next((rows for rows in TABLE if num_rows <= rows), max(TABLE))
    entry = TABLE[rows][name]
    step = min(entry.depth, depth & -depth)
    if num_columns % entry.columns or step < _LEAST_DEPTH:
        return None
    programs, splits = num_columns // entry.columns * -(-num_rows // rows), 1
    while programs * splits < entry.programs and splits < _MAX_SPLITS and depth % (2 * splits * step) == 0:
        splits *= 2
    return LinearTile(rows, entry.columns, step, splits, entry.stages, entry.warps, entry.swap, ahead=entry.ahead)


def fp8_linear_tiles(shape: DecodeShape, width: int, head: LinearTile) -> LinearTiles | None:
    """`head` is plain. A program of gate and up has as many columns of either."""
    qkv = fitted("qkv", width, shape.qkv_columns, shape.hidden)
    o = fitted("o", width, shape.hidden, shape.query_columns)
    gate_up = fitted("gate_up", width, shape.ffn, shape.hidden)
    down = fitted("down", width, shape.hidden, shape.ffn)
    if qkv is None or o is None or gate_up is None or down is None:
        return None
    return LinearTiles(qkv, o, gate_up, down, head)

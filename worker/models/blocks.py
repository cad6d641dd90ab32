"""Matrices whose weights stay in blocks of small codes, as quantized checkpoints have them; tiled for vector registers.

A block is a run of neighbouring weights of one row that share a scale, and perhaps an offset: the weight is
scale * code + offset in float32. For every format read here scale * code needs no rounding, so that these are the very
values that dequantising gives. Products over tiles are in `worker.cpu.blocks`; nothing here computes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int8]
Scalar = TypeVar("Scalar", bound=np.generic)

LANES = 16
"""Rows of a tile: one for each lane of a vector register."""
CHUNK = 8
"""Columns whose codes of four bits share a word of 32."""
_SCALE_BYTES = 4 * LANES
_CODE_BITS = (4, 8)
_LINE_BYTES = 64
_PIECE_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a block is stored: `bits` of a code (4: 0 to 15, 8: signed), `size` weights, whether it has an offset."""

    bits: int
    size: int
    has_offsets: bool

    def __post_init__(self) -> None:
        assert self.bits in _CODE_BITS, self
        assert self.size % CHUNK == 0, self

    @property
    def code_bytes(self) -> int:
        """Of the codes of one block in each row of a tile."""
        return self.size * LANES * self.bits // 8

    @property
    def tile_bytes(self) -> int:
        """Of one block in each row of a tile."""
        return self.code_bytes + (2 if self.has_offsets else 1) * _SCALE_BYTES


@dataclass(frozen=True, slots=True)
class Blocks:
    """One matrix [N, K] of `layout`, row by row: `codes` int8[N, K], `scales` and `offsets` float32[N, K / size]."""

    layout: BlockLayout
    codes: Codes
    scales: Floats
    offsets: Floats | None

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.codes.shape[1]

    def in_order(self, rows: npt.NDArray[np.int64]) -> Blocks:
        """The same rows in another order."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return Blocks(self.layout, self.codes[rows], self.scales[rows], offsets)


def stacked(parts: Sequence[Blocks]) -> Blocks:
    """Matrices of one layout and width above one another."""
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Blocks(
        parts[0].layout,
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate(offsets) if offsets else None,
    )


@dataclass(frozen=True, slots=True)
class Tiles:
    """One matrix [`num_rows`, K] as bytes [tiles, K / size, tile_bytes]; immutable. The last tile is filled with zeros.

    A tile holds for LANES rows and one block of each: codes, scales, offsets. Codes of 4 bits come as one word of 32
    bits for each row and CHUNK columns, the first column lowest; codes of 8 bits column by column, rows side by side.
    """

    layout: BlockLayout
    num_rows: int
    data: Bytes

    @property
    def num_columns(self) -> int:
        num_blocks: int = self.data.shape[1]
        return num_blocks * self.layout.size

    def values(self, rows: npt.NDArray[np.int64]) -> Floats:
        """The weights of `rows`, float32[len(rows), K]."""
        layout, lanes, picked = self.layout, rows % LANES, self.data[rows // LANES]
        num_rows, num_blocks = picked.shape[:2]
        every = np.arange(num_rows)
        stored, floats = picked[:, :, : layout.code_bytes], picked[:, :, layout.code_bytes :].view(np.float32)
        if layout.bits == 8:
            by_lane = stored.view(np.int8).reshape(num_rows, num_blocks, layout.size, LANES)
            codes = by_lane[every, :, :, lanes].astype(np.float32)
        else:
            words = stored.view(np.uint32).reshape(num_rows, num_blocks, layout.size // CHUNK, LANES)
            nibbles = words[every, :, :, lanes][..., None] >> _SHIFTS & np.uint32(15)
            codes = nibbles.reshape(num_rows, num_blocks, layout.size).astype(np.float32)
        weights = codes * floats[every, :, lanes][:, :, None]
        if layout.has_offsets:
            weights += floats[every, :, LANES + lanes][:, :, None]
        return weights.reshape(num_rows, self.num_columns)


_SHIFTS = np.arange(0, 4 * CHUNK, 4, dtype=np.uint32)


class Arena:
    """Room for tiles of many matrices, in pieces so large that numpy asks for huge pages.

    A decode reads every matrix once, and with small pages spends as long on finding them as on reading them.
    """

    def __init__(self) -> None:
        self._room = np.empty(0, dtype=np.uint8)

    def zeros(self, shape: tuple[int, ...]) -> Bytes:
        """Bytes that begin where a cache line does, so that no vector is read from two."""
        size = int(np.prod(shape))
        if size + _LINE_BYTES > len(self._room):
            self._room = np.empty(max(size + _LINE_BYTES, _PIECE_BYTES), dtype=np.uint8)
        first = -self._room.ctypes.data % _LINE_BYTES
        taken, self._room = self._room[first : first + size], self._room[first + size :]
        taken[:] = 0
        return taken.reshape(shape)


def tiled(blocks: Blocks, arena: Arena) -> Tiles:
    """Arrange a matrix for products, in room of `arena`."""
    layout, (num_rows, num_columns) = blocks.layout, blocks.shape
    num_tiles, num_blocks = -(-num_rows // LANES), num_columns // layout.size
    data = arena.zeros((num_tiles, num_blocks, layout.tile_bytes))
    codes = _padded(blocks.codes, num_tiles).reshape(num_tiles, LANES, num_blocks, layout.size)
    if layout.bits == 8:
        stored = codes.transpose(0, 2, 3, 1)
    else:
        nibbles = codes.astype(np.uint32).reshape(num_tiles, LANES, num_blocks, layout.size // CHUNK, CHUNK)
        words = np.bitwise_or.reduce(nibbles << _SHIFTS, axis=-1)
        stored = words.transpose(0, 2, 3, 1)
    flat = np.ascontiguousarray(stored).reshape(num_tiles, num_blocks, -1)
    data[:, :, : layout.code_bytes] = flat.view(np.uint8)
    floats = data[:, :, layout.code_bytes :].view(np.float32)
    for place, part in enumerate((blocks.scales, blocks.offsets)):
        if part is not None:
            by_tile = _padded(part, num_tiles).reshape(num_tiles, LANES, num_blocks)
            floats[:, :, place * LANES : (place + 1) * LANES] = by_tile.transpose(0, 2, 1)
    return Tiles(layout, num_rows, data)


def _padded(rows: npt.NDArray[Scalar], num_tiles: int) -> npt.NDArray[Scalar]:
    missing = num_tiles * LANES - len(rows)
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows

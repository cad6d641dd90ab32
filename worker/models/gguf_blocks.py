"""Reads the quantized types of GGUF as blocks of codes: what each type's bytes mean.

Formats are those of ggml (`ggml-common.h`): blocks of 32 weights with scales in float16, and "K" types, whose scales of
a few bits share one float16 in 256 weights. Other types have codes that are not numbers on a line (IQ*), and are
dequantised instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type

from worker.models.blocks import BlockLayout, Blocks, Bytes, Codes, Floats

_SIZE: Final = 32
_NIBBLES = BlockLayout(4, _SIZE, has_offsets=True)
_BYTES = BlockLayout(8, _SIZE, has_offsets=False)
_SHIFTED_BYTES = BlockLayout(8, _SIZE, has_offsets=True)
_SMALL_BLOCKS = BlockLayout(8, 16, has_offsets=False)
_Parts = tuple[Codes, Floats, Floats | None]


def blocks_of(data: Bytes, kind: Type) -> Blocks | None:
    """The matrix that `data` uint8[N, bytes of a row] holds; None where its type has no such blocks."""
    if kind not in _READERS:
        return None
    layout, block_bytes, read = _READERS[kind]
    num_rows = len(data)
    codes, scales, offsets = read(data.reshape(-1, block_bytes))
    return Blocks(
        layout,
        codes.reshape(num_rows, -1),
        scales.reshape(num_rows, -1),
        None if offsets is None else offsets.reshape(num_rows, -1),
    )


def _half(blocks: Bytes, at: int) -> Floats:
    """One float16 of each block."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)[:, 0]


def _nibbles(packed: Bytes) -> npt.NDArray[np.uint8]:
    """Low halves of all bytes, then their high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Bytes) -> npt.NDArray[np.uint8]:
    """32 bits of each block, lowest first, as 0 or 16."""
    return np.left_shift(np.unpackbits(packed, axis=-1, bitorder="little"), 4, dtype=np.uint8)


def _q4_0(blocks: Bytes) -> _Parts:
    scales = _half(blocks, 0)
    return _nibbles(blocks[:, 2:]).view(np.int8), scales, -8 * scales


def _q4_1(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]).view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return codes.view(np.int8) - np.int8(16), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return codes.view(np.int8), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8), _half(blocks, 0), None


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and offsets of the eight blocks of 32 in each 256: twelve bytes hold eight pairs of six bits."""
    packed = blocks[:, 4:16]
    low, high, mixed = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (mixed & 15) | (low >> 6 << 4)], axis=1)
    least = np.concatenate([high & 63, (mixed >> 4) | (high >> 6 << 4)], axis=1)
    return _half(blocks, 0)[:, None] * scales, -(_half(blocks, 2)[:, None] * least)


def _q4_k(blocks: Bytes) -> _Parts:
    scales, offsets = _k_scales(blocks)
    return _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(np.int8), scales, offsets


def _q5_k(blocks: Bytes) -> _Parts:
    scales, offsets = _k_scales(blocks)
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, 16:48, None].transpose(0, 2, 1) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return (low | fifth << 4).view(np.int8), scales, offsets


def _q6_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None] & 3
    codes = (low | high << 4).view(np.int8) - np.int8(32)
    return codes, _half(blocks, 208)[:, None] * blocks[:, 192:208].view(np.int8), None


_READERS: Final[dict[Type, tuple[BlockLayout, int, Callable[[Bytes], _Parts]]]] = {
    Type.Q4_0: (_NIBBLES, 18, _q4_0),
    Type.Q4_1: (_NIBBLES, 20, _q4_1),
    Type.Q5_0: (_BYTES, 22, _q5_0),
    Type.Q5_1: (_SHIFTED_BYTES, 24, _q5_1),
    Type.Q8_0: (_BYTES, 34, _q8_0),
    Type.Q4_K: (_NIBBLES, 144, _q4_k),
    Type.Q5_K: (_SHIFTED_BYTES, 176, _q5_k),
    Type.Q6_K: (_SMALL_BLOCKS, 210, _q6_k),
}
KEPT_TYPES: Final = tuple(_READERS)

"""Chooses how a decode step of a given width runs: which chain of kernels, and their tile sizes. Pure and in integers.

The numbers were tuned inside whole captured steps on one H200 (docs/gpu_decode_notes.md); winners of standalone
kernel timings are often not winners in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from worker.cuda.decode_shape import DecodeShape
from worker.cuda.fp8_tiles import fp8_linear_tiles
from worker.cuda.launch import launch_options
from worker.cuda.packed_tiles import MOST_ROWS, packed_gemv_tiles, packed_linear_tiles
from worker.cuda.tiles import GemvTile, GemvTiles, LinearTile, LinearTiles

ITEM_WORDS = 8
"""Words of a piece of attention's work, int32: its row, the row's slot, position and new cell, the row's first piece
and number of pieces, and which of them it is; one word is unused. See `decode_work`."""

# Models of this hidden size and less have tiles of their own.
_SMALL = 2048

# Attention's, of a lone row: two a multiprocessor, which are there all at once, so that what follows may start.
_LONE_PROGRAMS = 256

# Of each column's weights, asked for by products that wait for their rows.
_AHEAD = 128


class Chain(Enum):
    """`GEMV`: one row, plain multiply-adds, norms fused into the linears. `SPLIT_K`: tensor cores, linears cut along
    K, partials summed by the next kernel. `LIBRARY`: the vendor's matrix product; takes every shape and dtype."""

    GEMV = "gemv"
    SPLIT_K = "split_k"
    LIBRARY = "library"


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """`splits` (a power of two) of the context at most, each of at least `share` cells, `block` cells at a time, with
    `warps` and pipeline `stages` a program. `pieces`: the cells of all rows together are cut into about so many pieces
    instead, each of at least `share` cells, and one of `splits` stands for nothing; `share` is a multiple of 16.
    `first`: a program of few blocks loads the first one before it waits for its query."""

    splits: int
    block: int
    warps: int
    stages: int
    share: int = 16
    pieces: int | None = None
    first: bool = False

    def __post_init__(self) -> None:
        assert self.pieces is None or (self.splits == 1 and self.share % 16 == 0 and not self.first)

    def programs(self, width: int) -> int:
        """Programs of a KV head in a step of so many rows; each leaves at most one partial result."""
        return width * self.splits if self.pieces is None else width + self.pieces

    def loads_first(self, head_dim: int) -> bool:
        """Whether a block's keys, and its values, are at most 128 numbers a thread."""
        return self.first and self.block * head_dim <= 128 * 32 * self.warps


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How steps of up to `width` rows run. `gemv` belongs to the GEMV chain, `linear` to SPLIT_K. `dependent_launch`:
    kernels are launched as programmatic dependents of the one before (Hopper and later); the library's are not.
    `whole_gate_up`: SPLIT_K leaves gate and up as a product, in front of SiLU, so that something may be added to it.
    `down_parts`: LIBRARY cuts the K of down into so many, whose sums the next kernel adds."""

    width: int
    chain: Chain
    attention: AttentionTile
    gemv: GemvTiles | None = None
    linear: LinearTiles | None = None
    dependent_launch: bool = False
    whole_gate_up: bool = False
    down_parts: int = 1

    def __post_init__(self) -> None:
        assert self.width == 1 or self.chain is not Chain.GEMV
        assert (self.gemv is not None) == (self.chain is Chain.GEMV)
        assert (self.linear is not None) == (self.chain is Chain.SPLIT_K)
        assert self.down_parts == 1 or self.chain is Chain.LIBRARY

    @property
    def early_qkv(self) -> bool:
        """Whether attention may start before q/k/v have waited, and so before the step's first kernel has ended."""
        tiles = self.gemv or self.linear
        return tiles is not None and tiles.qkv.early

    def launch(self, warps: int, stages: int = 2) -> dict[str, Any]:
        """Options of a kernel's launch within a step."""
        return launch_options(warps, stages, dependent=self.dependent_launch)


def adapted(plan: DecodePlan, shape: DecodeShape) -> DecodePlan:
    """How steps of the same width run with adapters, which are added to every product before it is used."""
    fast = plan.chain is not Chain.LIBRARY
    linear = _linears(shape, plan.width, whole_gate_up=True) if fast else None
    if linear is None:
        return DecodePlan(plan.width, Chain.LIBRARY, plan.attention)
    return replace(plan, chain=Chain.SPLIT_K, gemv=None, linear=linear, whole_gate_up=True)


def plan_decode(shape: DecodeShape, width: int, *, hopper: bool) -> DecodePlan:
    """The plan of a width. Without `hopper` (compute capability 9.0 or later), or for a shape or dtype that the fast
    chains do not take, it is the library chain."""
    small = shape.hidden <= _SMALL
    attention = _attention(shape, width)
    library = DecodePlan(width, Chain.LIBRARY, attention, dependent_launch=hopper, down_parts=_down_parts(shape, width))
    largest = max(shape.vocab_size, 2 * shape.ffn, shape.qkv_columns) * max(shape.hidden, shape.query_columns)
    # The fast kernels index a weight with 32 bits.
    if not hopper or shape.dtype is not torch.bfloat16 or shape.mlp_bias or largest >= 2**31:
        return library
    widest = MOST_ROWS if shape.bits is not None else 256 if small else 64
    if width == 1 and not shape.output_bias and (gemv := _gemvs(shape)) is not None:
        return DecodePlan(width, Chain.GEMV, _looks_ahead(attention), gemv=gemv, dependent_launch=True)
    if width <= widest and (plan := split_plan(shape, width)) is not None:
        return plan
    return library


def _down_parts(shape: DecodeShape, width: int) -> int:
    """Down has few columns and a long K: in one go its tiles leave half of the multiprocessors idle, and where the
    library cuts K by itself a kernel of its own adds the parts up. Of more rows there are tiles enough."""
    # The library's better kernels load 16 bytes at a time, and so both parts start at a multiple of that.
    return 2 if shape.plain_halves and 64 < width <= 256 and shape.ffn >= 8192 and shape.ffn % 16 == 0 else 1


def split_plan(shape: DecodeShape, width: int) -> DecodePlan | None:
    """The SPLIT_K chain on a GPU that has all it takes, whether or not it is the fastest; None where no tile fits."""
    linear = _linears(shape, width)
    if linear is None:
        return None
    attention = _looks_ahead(_attention(shape, width))
    return DecodePlan(width, Chain.SPLIT_K, attention, linear=linear, dependent_launch=True)


def _gemvs(shape: DecodeShape) -> GemvTiles | None:
    if shape.quantization == "fp8":  # whose lone rows are multiplied as others are
        return None
    return _gemv(shape, shape.hidden <= _SMALL) if shape.bits is None else packed_gemv_tiles(shape, shape.bits)


def _linears(shape: DecodeShape, width: int, *, whole_gate_up: bool = False) -> LinearTiles | None:
    if shape.bits is not None:
        return packed_linear_tiles(shape, shape.bits, width, whole_gate_up=whole_gate_up)
    tiles = _linear(shape, width, shape.hidden <= _SMALL)
    return fp8_linear_tiles(shape, width, tiles.head) if tiles is not None and shape.quantization == "fp8" else tiles


def _looks_ahead(tile: AttentionTile) -> AttentionTile:
    """In a step whose kernels start before the one in front of them has ended."""
    return replace(tile, first=tile.splits > 1)


def _attention(shape: DecodeShape, width: int) -> AttentionTile:
    """Compromises between contexts of 256 and of 2,000: what is best at one may take twice as long at the other."""
    small = shape.hidden <= _SMALL
    if width == 1:
        most = max(1, _LONE_PROGRAMS // shape.num_kv_heads)
        splits = min(16, 1 << (most.bit_length() - 1))
        return AttentionTile(splits, block=64, warps=8, stages=1, share=32 if small else 16)
    if width <= 4:
        return AttentionTile(splits=8, block=64, warps=4, stages=1, share=64)
    if width <= 8:
        return AttentionTile(splits=4, block=64, warps=4, stages=1, share=64)
    if width <= 16:
        return AttentionTile(splits=1, block=64, warps=2, stages=5)
    if width <= 32:
        return _listed(stages=5, share=384, pieces=64 if small else 128)
    if width <= 64:
        return _listed(stages=3 if small and width > 48 else 5, share=384, pieces=128)
    if small:
        return _listed(stages=3, share=512, pieces=256)
    return _listed(stages=3 if width <= 128 else 5, share=256, pieces=256)


def _listed(stages: int, share: int, pieces: int) -> AttentionTile:
    return AttentionTile(splits=1, block=32, warps=1, stages=stages, share=share, pieces=pieces)


def _gemv(shape: DecodeShape, small: bool) -> GemvTiles | None:
    def tile(n: int, k: int, columns: int, deepest: int, warps: int, *, early: bool = False) -> GemvTile | None:
        depth = min(deepest, k & -k)  # the largest power of two that divides K
        return GemvTile(columns, depth, warps, early) if depth >= 64 and n % columns == 0 else None

    if small:
        qkv = tile(shape.qkv_columns, shape.hidden, 4, 1024, 2, early=True)
        gate_up = tile(shape.ffn, shape.hidden, 2, 1024, 2, early=True)
        down = tile(shape.hidden, shape.ffn, 4, 1024, 4, early=True)
        head = tile(0, shape.hidden, 16, 1024, 4)
    else:
        qkv = tile(shape.qkv_columns, shape.hidden, 4, 2048, 4, early=True)
        gate_up = tile(shape.ffn, shape.hidden, 2, 2048, 4)
        down = tile(shape.hidden, shape.ffn, 4, 2048, 4, early=True)
        head = tile(0, shape.hidden, 4, 2048, 4)
    o = tile(shape.hidden, shape.query_columns, 4, 2048, 4, early=True)
    if qkv is None or o is None or gate_up is None or down is None or head is None:
        return None
    return GemvTiles(qkv, o, gate_up, down, head)


def _tall(tile: LinearTile | None) -> LinearTile | None:
    """128 rows a program, so that a weight is loaded half as often."""
    return None if tile is None else replace(tile, rows=128, warps=8)


def _linear(shape: DecodeShape, width: int, small: bool) -> LinearTiles | None:
    rows = 16 if width <= 16 else 32 if width <= 32 else 64
    swap = rows < 64
    stages = 6 if swap or not small else 4

    def tile(n: int, k: int, columns: int, depth: int, stages: int, warps: int = 4) -> LinearTile | None:
        depth = min(depth, k & -k)
        return None if n % columns or depth < 32 else LinearTile(rows, columns, depth, 1, stages, warps, swap)

    def cut(n: int, k: int) -> LinearTile | None:
        """K in as many parts as it takes to give most multiprocessors a program."""
        whole = tile(n, k, 64, 128, stages)
        if whole is None:
            return None
        programs, splits, most = n // 64 * -(-width // rows), 1, 8 if swap else 4
        while programs * splits < (128 if swap else 96) and splits < most and k % (2 * splits * whole.depth) == 0:
            splits *= 2
        return replace(whole, splits=splits)

    qkv = cut(shape.qkv_columns, shape.hidden)
    if width > 128:
        qkv = _tall(qkv)
    o = cut(shape.hidden, shape.query_columns)
    down = cut(shape.hidden, shape.ffn)
    if swap and small:
        gate_up = tile(shape.ffn, shape.hidden, 64, 128, 4)
    elif swap:
        columns = 128 if rows == 16 and shape.ffn % 128 == 0 else 64
        gate_up = tile(shape.ffn, shape.hidden, columns, 128, 3 if columns == 128 else 4)
    elif small:
        gate_up = tile(shape.ffn, shape.hidden, 32, 128, 6) if width <= 64 else tile(shape.ffn, shape.hidden, 64, 64, 4)
        gate_up = _tall(gate_up) if width > 128 else gate_up
    else:
        gate_up = tile(shape.ffn, shape.hidden, 64, 128, 4)
    head = tile(0, shape.hidden, 128, 128, 3) if swap else tile(0, shape.hidden, 128, 64, 3, warps=4 if small else 8)
    head = _tall(head) if width > 64 else head
    if qkv is None or o is None or gate_up is None or down is None or head is None:
        return None
    if small or rows == 64:
        qkv, o, gate_up, down = (replace(each, ahead=_AHEAD) for each in (qkv, o, gate_up, down))
    if small and rows != 32:
        o, down = replace(o, early=True), replace(down, early=True)
    return LinearTiles(replace(qkv, early=rows == 16), o, gate_up, down, head)

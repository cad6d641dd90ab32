"""The tiles that `packed_products` times: the engine's own of each product, and what may be better."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from worker.cuda.decode_plan import plan_decode
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.packed_tiles import gate_up_tile, head_tile, packed_gemv_tiles, product_tile
from worker.cuda.tiles import GemvTile, GemvTiles, LinearTile, LinearTiles

Tile = GemvTile | LinearTile


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix [columns, depth]; gate and up are one, whose halves are multiplied with each other."""

    name: str
    columns: int
    depth: int

    @property
    def is_gate_up(self) -> bool:
        return self.name == "gate_up"


def own_tile(shape: DecodeShape, product: Product, rows: int, bits: int) -> Tile | None:
    """What the engine runs; of bfloat16 none where the library does."""
    if bits < 16 and product.name == "head" and rows > 1:
        return head_tile(rows, product.columns, product.depth)
    if bits < 16 and rows == 1:
        lone = packed_gemv_tiles(shape, bits)
        return None if lone is None else tile_of(lone, product)
    if bits < 16 and product.is_gate_up:
        return gate_up_tile(bits, rows, product.columns // 2, product.depth)
    if bits < 16:
        return product_tile(bits, rows, product.columns, product.depth)
    plan = plan_decode(shape, rows, hopper=True)
    tiles = plan.gemv or plan.linear
    return None if tiles is None else tile_of(tiles, product)


def tile_of(tiles: GemvTiles | LinearTiles, product: Product) -> Tile:
    tile: Tile = getattr(tiles, product.name)
    return tile


def variants(product: Product, bits: int, own: Tile) -> Iterable[Tile]:
    """The engine's own and what may be better, the most telling first."""
    yield own
    if isinstance(own, GemvTile):
        takes_more = product.is_gate_up or product.name == "qkv"  # than one eight of columns
        for columns, warps in ((8, 2), (8, 4), (16, 2), (16, 4), (32, 4), (8, 1), (8, 8)):
            each = columns // 2 if product.is_gate_up else columns
            tile = GemvTile(each, warps * 32 * 128 // bits, warps, own.early)
            if tile != own and product.columns % columns == 0 and (takes_more or columns == 8):
                yield tile
        yield replace(own, early=not own.early)
        return
    other_splits = () if product.name in ("gate_up", "head") else (own.splits // 2, own.splits * 2)
    for splits in other_splits:
        if splits and product.depth % (splits * own.depth) == 0 and splits <= 8:
            yield replace(own, splits=splits)
    for stages in (own.stages - 1, own.stages + 1):
        yield replace(own, stages=stages)
    wide = own.columns * (2 if product.is_gate_up else 1) == 128
    depth = own.depth * 2 if wide and bits == 4 and own.rows < 64 else own.depth // 2 if not wide else own.depth
    columns = own.columns // 2 if wide else own.columns * 2
    if product.columns % columns == 0 and product.depth % (own.splits * depth) == 0:
        yield replace(own, columns=columns, depth=depth, warps=4)
    yield replace(own, warps=12 - own.warps)  # 8 for 4 and 4 for 8
    if product.name != "head":
        yield replace(own, early=True)
        if product.depth // own.splits >= 512:
            yield replace(own, early=True, ahead=512)
    if own.depth > 64:
        yield replace(own, depth=own.depth // 2, stages=own.stages + 1)

"""Adapters on a GPU: their slots, and the launches that add their part to a layer's products.

All that a launch depends on but sizes is on the device at fixed addresses: which slot each row's adapter has, and the
slots' matrices. So launches can be captured, and adapters come and go without capturing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planner.request import Adapter
from worker.adapters import AdapterMatrices
from worker.cuda.decode_buffers import next_power_of_2
from worker.cuda.decode_state import NO_ADAPTER
from worker.cuda.lora_kernels import expand_rows_kernel, expand_tiles_kernel, shrink_rows_kernel, shrink_tiles_kernel
from worker.cuda.lora_room import RANK_BLOCK, DeviceLoraRoom, PackedLora
from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, Site, read_lora

# Rows up to which each has programs of its own; beyond, matrices are read once for a tile of rows.
FEW_ROWS = 32
_WIDE_FROM = 1024
_MOST_LANES = 8
_MOST_SPLITS = 8
# About what a GPU has room for at once.
_PROGRAMS = 256


class CudaLoraSlots:
    """An `AdapterSlots`. Owner: the executor. All slots' room is taken when it is made, so that loading never fails for
    want of memory."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises torch's `OutOfMemoryError` where there is no room."""
        self._config = config
        self._room = DeviceLoraRoom(config, num_slots, max_rank, dtype, device)
        self._slot_of: dict[Adapter, int] = {}

    @property
    def num_slots(self) -> int:
        return self._room.num_slots

    @property
    def device(self) -> torch.device:
        return self._room.device

    def read(self, folder: Path) -> PackedLora:
        return self.packed(read_lora(folder, self._config, self._room.max_rank))

    def packed(self, matrices: LoraMatrices) -> PackedLora:
        """As `put` takes them; on any thread."""
        return self._room.pack(matrices)

    def put(self, slot: int, adapter: Adapter, matrices: AdapterMatrices) -> None:
        assert isinstance(matrices, PackedLora), "matrices of another executor"
        assert slot not in self._slot_of.values(), "the slot is taken"
        self._room.fill(slot, matrices)
        self._slot_of[adapter] = slot

    def drop(self, adapter: Adapter) -> None:
        del self._slot_of[adapter]

    @contextmanager
    def nothing(self) -> Iterator[Adapter]:
        """An adapter that changes nothing, in the first slot, for as long as there is no other."""
        adapter = Adapter("", 0)
        self.put(0, adapter, self.packed(LoraMatrices(adapter.revision, {})))
        try:
            yield adapter
        finally:
            self.drop(adapter)

    def slots_of(self, adapters: Sequence[Adapter | None]) -> list[int]:
        """As kernels want to be told: `NO_ADAPTER` for None."""
        return [NO_ADAPTER if adapter is None else self._slot_of[adapter] for adapter in adapters]

    def beside(self, row_slots: Tensor, *, dependent_launch: bool = False) -> LoraRows:
        """What adds to the products of a forward whose rows have their slots, or `NO_ADAPTER`, in `row_slots` int32[T]
        when it runs. `dependent_launch`: as the forward's own kernels are launched."""
        return LoraRows(self._room, row_slots, dependent_launch)


class LoraRows:
    """A `Beside` of forwards of so many rows. It only launches on torch's current stream."""

    def __init__(self, room: DeviceLoraRoom, row_slots: Tensor, dependent_launch: bool) -> None:
        self._room = room
        self._row_slots = row_slots
        self._dependent_launch = dependent_launch

    def of(self, rows: Tensor) -> LoraRows:
        """For a forward that goes on with these rows only, int64[K]."""
        return LoraRows(self._room, self._row_slots.index_select(0, rows), self._dependent_launch)

    def add(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        """`x` [T, K] and `product` [T, N] are contiguous."""
        assert len(x) == len(product) == len(self._row_slots), (x.shape, product.shape, self._row_slots.shape)
        assert x.is_contiguous()
        assert product.is_contiguous()
        if len(x) == 0:
            return
        shape = self._room.shapes[site]
        # What is narrow goes into memory that another product may have had: kernels in between wait for each other.
        sizes = (len(x), len(shape.outputs), self._room.room_rank)
        if len(x) <= FEW_ROWS:
            self._add_to_rows(layer, site, x, x.new_empty(sizes, dtype=torch.float32), product)
        else:
            tiles = _Tiles.of(sizes, shape.num_inputs)
            self._add_to_tiles(layer, site, x, x.new_empty((tiles.splits, *sizes), dtype=torch.float32), product, tiles)

    def _add_to_rows(self, layer: int, site: Site, x: Tensor, narrow: Tensor, product: Tensor) -> None:
        room, sizes = self._room.sites[site], _Sizes.of(self._room, site)
        ranks = 1 if len(x) <= 4 else 2 if len(x) <= 8 else 4
        shrink_rows_kernel[(len(x), sizes.num_parts * sizes.room_rank // ranks)](
            x, self._row_slots, room.downs[0, layer], room.ranks[0, layer:], narrow,
            **sizes.down, RANKS=ranks, DEPTH=min(4096 // ranks, next_power_of_2(sizes.num_inputs)), **self._launch(4),
        )  # fmt: skip
        columns = 128
        expand_rows_kernel[(len(x), sizes.column_blocks(columns))](
            narrow, self._row_slots, room.ups[0, layer], room.ranks[0, layer:], product,
            **sizes.up, RANKS=RANK_BLOCK, COLUMNS=columns, **self._launch(4),
        )  # fmt: skip

    def _add_to_tiles(self, layer: int, site: Site, x: Tensor, narrow: Tensor, product: Tensor, tiles: _Tiles) -> None:
        room, sizes = self._room.sites[site], _Sizes.of(self._room, site)
        num_rows, num_slots = len(x), self._room.num_slots
        both = {"ROWS": tiles.rows, "RANKS": RANK_BLOCK, "SPLITS": tiles.splits, "LANES": min(_MOST_LANES, num_slots)}
        shrink_tiles_kernel[(tiles.number, tiles.splits * tiles.rank_blocks, both["LANES"])](
            x, self._row_slots, room.downs[0, layer], room.ranks[0, layer:], narrow, num_rows, num_slots,
            **sizes.down, **both, DEPTH=tiles.depth, **self._launch(4),
        )  # fmt: skip
        columns = 128
        expand_tiles_kernel[(tiles.number, sizes.column_blocks(columns), both["LANES"])](
            narrow, self._row_slots, room.ups[0, layer], room.ranks[0, layer:], product, num_rows, num_slots,
            **sizes.up, **both, COLUMNS=columns, **self._launch(4 if tiles.rows == 16 else 8),
        )  # fmt: skip

    def _launch(self, warps: int) -> dict[str, Any]:
        options: dict[str, Any] = {"PDL": self._dependent_launch, "num_warps": warps}
        return options | {"launch_pdl": True} if self._dependent_launch else options


@dataclass(frozen=True, slots=True)
class _Tiles:
    """How many rows are taken together, in so many tiles, and K `depth` at a time in `splits`."""

    rows: int
    number: int
    rank_blocks: int
    depth: int
    splits: int

    @classmethod
    def of(cls, sizes: tuple[int, int, int], num_inputs: int) -> _Tiles:
        """Of a product of so many rows, parts and ranks. K is cut where there would be few programs, each with many
        turns to wait for."""
        num_rows, num_parts, room_rank = sizes
        rows, depth = (64, 128) if num_rows >= _WIDE_FROM else (16, 256)
        number, rank_blocks = -(-num_rows // rows), num_parts * room_rank // RANK_BLOCK
        depth, splits = max(16, min(depth, next_power_of_2(num_inputs))), 1
        while splits < _MOST_SPLITS and number * rank_blocks * splits < _PROGRAMS and num_inputs >= 8 * splits * depth:
            splits *= 2
        return cls(rows, number, rank_blocks, depth, splits)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What kernels are compiled for at one site: `down` of the first product, `up` of the second."""

    num_inputs: int
    outputs: tuple[int, ...]
    room_rank: int
    down: dict[str, int]
    up: dict[str, int]

    @classmethod
    def of(cls, room: DeviceLoraRoom, site: Site) -> _Sizes:
        shape, matrices = room.shapes[site], room.sites[site]
        first, *rest = shape.outputs
        assert len(set(rest)) <= 1, "parts after the first have equally many columns"
        both = {"R": room.room_rank, "PARTS": len(shape.outputs), "RANK_STRIDE": matrices.ranks.stride(0)}
        down = both | {"K": shape.num_inputs, "DOWN_STRIDE": matrices.downs.stride(0)}
        up = both | {"N": shape.num_outputs, "FIRST": first, "REST": rest[0] if rest else 0}
        up["UP_STRIDE"] = matrices.ups.stride(0)
        return cls(shape.num_inputs, shape.outputs, room.room_rank, down, up)

    @property
    def num_parts(self) -> int:
        return len(self.outputs)

    def column_blocks(self, columns: int) -> int:
        """Blocks of so many columns, none across two parts."""
        return sum(-(-size // columns) for size in self.outputs)

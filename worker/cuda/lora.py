"""Adapters on a GPU: their slots, and the launches that add their part to a layer's products.

All that a launch depends on but sizes is on the device at fixed addresses: which slot each row's adapter has, and the
slots' matrices. So launches can be captured, and adapters come and go without capturing again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from planner.request import Adapter
from worker.adapters import AdapterMatrices
from worker.cuda.decode_buffers import next_power_of_2
from worker.cuda.decode_state import NO_ADAPTER
from worker.cuda.launch import launch_options
from worker.cuda.lora_kernels import expand_rows_kernel, expand_tiles_kernel, shrink_rows_kernel, shrink_tiles_kernel
from worker.cuda.lora_room import RANK_BLOCK, DeviceLoraRoom, PackedLora
from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, Site, read_lora

# Rows up to which each has programs of its own; beyond, matrices are read once for a tile of rows.
FEW_ROWS = 32
_COLUMNS = 128
_LANES = 8  # that share the slots out among them


class _Tile(NamedTuple):
    """From `least_rows` on: so many rows together, K `depth` at a time and in as many as `splits` parts, so that a few
    tiles are enough programs; `warps` of the second kernel."""

    least_rows: int
    rows: int
    depth: int
    splits: int
    warps: int


# Few kinds: each is compiled when it first runs, which should be at the start.
_TILES = (_Tile(4096, 64, 128, 1, 8), _Tile(1024, 64, 128, 4, 8), _Tile(0, 16, 256, 8, 4))


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
        self._options = partial(launch_options, dependent=dependent_launch)

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
        if len(x) <= FEW_ROWS:
            self._add_to_rows(layer, site, x, product)
        else:
            self._add_to_tiles(layer, site, x, product)

    # `narrow` may lie where the one of another product lay: the kernels in between wait for each other.

    def _add_to_rows(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        room, sizes = self._room.sites[site], self._room.sizes[site]
        narrow = x.new_empty((len(x), sizes.num_parts, sizes.room_rank), dtype=torch.float32)
        ranks = 1 if len(x) <= 4 else 4
        shrink_rows_kernel[(len(x), sizes.num_parts * sizes.room_rank // ranks)](
            x, self._row_slots, room.downs[0, layer], room.ranks[0, layer:], narrow,
            **sizes.down, RANKS=ranks, DEPTH=min(4096 // ranks, next_power_of_2(sizes.num_inputs)), **self._options(4),
        )  # fmt: skip
        expand_rows_kernel[(len(x), sizes.column_blocks(_COLUMNS))](
            narrow, self._row_slots, room.ups[0, layer], room.ranks[0, layer:], product,
            **sizes.up, RANKS=RANK_BLOCK, COLUMNS=_COLUMNS, **self._options(4),
        )  # fmt: skip

    def _add_to_tiles(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        room, sizes, num_rows, num_slots = self._room.sites[site], self._room.sizes[site], len(x), self._room.num_slots
        tile = next(tile for tile in _TILES if num_rows >= tile.least_rows)
        depth = max(16, min(tile.depth, next_power_of_2(sizes.num_inputs)))
        splits = tile.splits
        while sizes.num_inputs < 4 * splits * depth and splits > 1:
            splits //= 2
        narrow = x.new_empty((splits, num_rows, sizes.num_parts, sizes.room_rank), dtype=torch.float32)
        num_tiles = -(-num_rows // tile.rows)
        both = {"ROWS": tile.rows, "RANKS": RANK_BLOCK, "SPLITS": splits, "LANES": _LANES}
        shrink_tiles_kernel[(num_tiles, splits * sizes.num_parts * sizes.room_rank // RANK_BLOCK, _LANES)](
            x, self._row_slots, room.downs[0, layer], room.ranks[0, layer:], narrow, num_rows, num_slots,
            **sizes.down, **both, DEPTH=depth, **self._options(4),
        )  # fmt: skip
        expand_tiles_kernel[(num_tiles, sizes.column_blocks(_COLUMNS), _LANES)](
            narrow, self._row_slots, room.ups[0, layer], room.ranks[0, layer:], product, num_rows, num_slots,
            **sizes.up, **both, COLUMNS=_COLUMNS, **self._options(tile.warps),
        )  # fmt: skip

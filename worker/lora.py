"""Adapters' low-rank products beside a decoder's own, for the rows of a forward that want them.

Rows of one adapter are computed together by torch; lone rows on a CPU all at once (`worker.cpu.lora`). Rows without an
adapter cost nothing, and a forward of such rows alone nothing at all.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from planner.request import Adapter
from worker.adapters import AdapterMatrices
from worker.batch import Batch
from worker.cpu.lora import AddLowRank, compile_add_low_rank
from worker.lora_room import LoraRoom
from worker.models.config import ModelConfig
from worker.models.decoder import Beside
from worker.models.lora import LoraMatrices, Site, read_lora


class LoraSlots:
    """An `AdapterSlots`. Owner: the executor. Room for all slots at their widest is taken up front, so that loading
    never fails for want of memory."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """On a CPU in float32 this compiles kernels, once a machine."""
        self._config = config
        self._max_rank = max_rank
        self._slot_of: dict[Adapter, int] = {}
        self._room = LoraRoom(config, num_slots, max_rank, dtype, device)
        self._add, self._add_one = None, None
        if device.type == "cpu" and dtype == torch.float32:
            self._add = compile_add_low_rank(parallel=True)
            self._add_one = compile_add_low_rank(parallel=False)

    @property
    def num_slots(self) -> int:
        return self._room.num_slots

    def read(self, folder: Path) -> LoraMatrices:
        return read_lora(folder, self._config, self._max_rank)

    def put(self, slot: int, adapter: Adapter, matrices: AdapterMatrices) -> None:
        assert isinstance(matrices, LoraMatrices), "matrices of another executor"
        assert slot not in self._slot_of.values(), "the slot is taken"
        self._room.fill(slot, matrices)
        self._slot_of[adapter] = slot

    def drop(self, adapter: Adapter) -> None:
        del self._slot_of[adapter]

    def beside(self, batch: Batch) -> Beside | None:
        """What is to be added to the products of this forward; None where no row has an adapter."""
        adapters = [piece.chunk.adapter for piece in batch.pieces]
        if not any(adapters):
            return None
        if self._add is not None and self._add_one is not None and len(adapters) == len(batch.tokens):
            slots = np.array([-1 if adapter is None else self._slot_of[adapter] for adapter in adapters], np.int64)
            return _LoneRows(self._room, slots, self._add if len(slots) > 1 else self._add_one)
        spans: dict[int, list[range]] = defaultdict(list)
        for piece, adapter in zip(batch.pieces, adapters, strict=True):
            if adapter is not None:
                spans[self._slot_of[adapter]].append(range(piece.row, piece.row + piece.length))
        device = self._room.device
        return _GroupedRows(self._room, [_Group(slot, _rows(ranges, device)) for slot, ranges in spans.items()])


class _LoneRows:
    """A `Beside` of a forward each of whose rows is a sequence of its own; on a CPU in float32."""

    def __init__(self, room: LoraRoom, slots: np.ndarray[tuple[int], np.dtype[np.int64]], add: AddLowRank) -> None:
        self._room = room
        self._slots = slots
        self._add = add

    def add(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        room, table = self._room, self._room.tables[site]
        self._add(
            x.numpy(),
            product.numpy(),
            self._slots,
            room.numbers,
            table.downs[layer],
            table.ups[layer],
            table.ranks[layer],
            table.outputs,
        )


class _Group(NamedTuple):
    """The rows of a forward that one slot's adapter is for: neighbours as a slice, others by int64 index."""

    slot: int
    rows: slice | Tensor


class _GroupedRows:
    """A `Beside` of one forward."""

    def __init__(self, room: LoraRoom, groups: list[_Group]) -> None:
        self._room = room
        self._groups = groups

    def add(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        for slot, rows in self._groups:
            parts = self._room.parts(slot, layer, site)
            if not parts:
                continue
            mine = x[rows] if isinstance(rows, slice) else x.index_select(0, rows)
            grown = product[rows] if isinstance(rows, slice) else product.index_select(0, rows)
            for first, pair in parts:
                outputs = grown[:, first : first + pair.up.shape[1]]
                outputs.addmm_(functional.linear(mine, pair.down), pair.up)
            if not isinstance(rows, slice):
                product.index_copy_(0, rows, grown)


def _rows(ranges: list[range], device: torch.device) -> slice | Tensor:
    first, end = ranges[0].start, ranges[-1].stop
    if sum(map(len, ranges)) == end - first:
        return slice(first, end)
    return torch.tensor([row for rows in ranges for row in rows], dtype=torch.int64, device=device)

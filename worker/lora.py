"""Adapters' low-rank products beside a decoder's own, for the rows of a forward that want them; plain torch.

Rows of one adapter are computed together, so a forward takes two small products for each adapter in it and matrix that
the adapter has. Rows without an adapter cost nothing, and a forward of such rows alone nothing at all.
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
from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, LowRank, Site, read_lora, site_shapes


class LoraSlots:
    """An `AdapterSlots`. Owner: the executor. Room for all slots at their widest is taken up front, so that loading
    never fails for want of memory."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config = config
        self._max_rank = max_rank
        self._slot_of: dict[Adapter, int] = {}
        self._room = [_SlotRoom(config, max_rank, dtype, device) for _ in range(num_slots)]

    @property
    def num_slots(self) -> int:
        return len(self._room)

    def read(self, folder: Path) -> LoraMatrices:
        return read_lora(folder, self._config, self._max_rank)

    def put(self, slot: int, adapter: Adapter, matrices: AdapterMatrices) -> None:
        assert isinstance(matrices, LoraMatrices), "matrices of another executor"
        assert slot not in self._slot_of.values(), "the slot is taken"
        self._room[slot].fill(matrices)
        self._slot_of[adapter] = slot

    def drop(self, adapter: Adapter) -> None:
        del self._slot_of[adapter]

    def beside(self, batch: Batch) -> LoraRows | None:
        """What is to be added to the products of this forward; None where no row has an adapter."""
        spans: dict[Adapter, list[range]] = defaultdict(list)
        for piece in batch.pieces:
            if piece.chunk.adapter is not None:
                spans[piece.chunk.adapter].append(range(piece.row, piece.row + piece.length))
        if not spans:
            return None
        device = self._room[0].device
        return LoraRows(
            [_Group(self._room[self._slot_of[adapter]], _rows(ranges, device)) for adapter, ranges in spans.items()]
        )


class _SlotRoom:
    """The matrices of one slot: flat memory for the widest adapter, and what now lies in it."""

    def __init__(self, config: ModelConfig, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._shapes = site_shapes(config)
        self._sizes = {
            site: len(site.parts) * max_rank * (shape.num_inputs + shape.num_outputs)
            for site, shape in self._shapes.items()
        }
        size = config.num_layers * sum(self._sizes.values())
        # On the CPU, zeros of numpy's take no memory before they are written.
        self._flat = (
            torch.from_numpy(np.zeros(size * dtype.itemsize, np.uint8)).view(dtype)
            if device.type == "cpu"
            else torch.zeros(size, dtype=dtype, device=device)
        )
        self.products: dict[tuple[int, Site], LowRank] = {}

    def fill(self, matrices: LoraMatrices) -> None:
        self.products = {}
        at = 0
        for key, given in matrices.products.items():
            num_down, num_up = given.down.numel(), given.up.numel()
            down = self._flat[at : at + num_down].view_as(given.down)
            up = self._flat[at + num_down : at + num_down + num_up].view_as(given.up)
            at += num_down + num_up
            self.products[key] = LowRank(down.copy_(given.down), up.copy_(given.up))


class _Group(NamedTuple):
    """The rows of a forward that one slot's adapter is for: neighbours as a slice, others by int64 index."""

    room: _SlotRoom
    rows: slice | Tensor


class LoraRows:
    """A `Beside` of one forward."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups

    def add(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        for room, rows in self._groups:
            pair = room.products.get((layer, site))
            if pair is None:
                continue
            if isinstance(rows, slice):
                product[rows].addmm_(functional.linear(x[rows], pair.down), pair.up.T)
            else:
                narrow = functional.linear(x.index_select(0, rows), pair.down)
                product.index_add_(0, rows, functional.linear(narrow, pair.up))


def _rows(ranges: list[range], device: torch.device) -> slice | Tensor:
    first, end = ranges[0].start, ranges[-1].stop
    if sum(map(len, ranges)) == end - first:
        return slice(first, end)
    return torch.tensor([row for rows in ranges for row in rows], dtype=torch.int64, device=device)

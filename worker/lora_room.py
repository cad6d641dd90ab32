"""The memory of adapters' slots: flat room for the widest adapter each, and where in it an adapter's matrices lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker.cpu.decode import Floats, Integers
from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, LowRank, Site, SiteShape, site_shapes


class PlacedPart(NamedTuple):
    """`pair` adds to the outputs of a product from `first` on."""

    first: int
    pair: LowRank


@dataclass(frozen=True, slots=True)
class SiteTable:
    """Of one site, for compiled passes: where in the room matrices begin, `downs` and `ups` int64[layers, slots];
    `ranks` int64[layers, slots, parts], 0 for what is not there; `outputs` int64[parts]."""

    downs: Integers
    ups: Integers
    ranks: Integers
    outputs: Integers

    @classmethod
    def empty(cls, num_layers: int, num_slots: int, shape: SiteShape) -> SiteTable:
        places = np.zeros((num_layers, num_slots), np.int64)
        ranks = np.zeros((num_layers, num_slots, len(shape.outputs)), np.int64)
        return cls(places, places.copy(), ranks, np.array(shape.outputs, np.int64))


class LoraRoom:
    """Owner: `LoraSlots`. A slot is filled while nothing computes with it."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_slots = num_slots
        self.device = device
        self._num_layers = config.num_layers
        shapes = site_shapes(config)
        sizes = [len(shape.outputs) * shape.num_inputs + shape.num_outputs for shape in shapes.values()]
        self._slot_size = config.num_layers * max_rank * sum(sizes)
        size = num_slots * self._slot_size
        if device.type == "cpu":  # zeros of numpy's take no memory before they are written
            self._flat = torch.from_numpy(np.zeros(size * dtype.itemsize, np.uint8)).view(dtype)
        else:
            self._flat = torch.zeros(size, dtype=dtype, device=device)
        self.tables = {site: SiteTable.empty(config.num_layers, num_slots, shape) for site, shape in shapes.items()}
        self._outputs = {site: shape.outputs for site, shape in shapes.items()}
        self._parts: list[dict[tuple[int, Site], list[PlacedPart]]] = [{} for _ in range(num_slots)]

    @property
    def numbers(self) -> Floats:
        """All of it, float32 on a CPU."""
        numbers: Floats = self._flat.numpy()
        return numbers

    def parts(self, slot: int, layer: int, site: Site) -> list[PlacedPart]:
        """What a slot's adapter adds there."""
        return self._parts[slot].get((layer, site), [])

    def fill(self, slot: int, matrices: LoraMatrices) -> None:
        """Copy an adapter in, in place of what was there."""
        for table in self.tables.values():
            table.ranks[:, slot] = 0
        placed: dict[tuple[int, Site], list[PlacedPart]] = {}
        at = slot * self._slot_size
        for (layer, site), pairs in matrices.products.items():
            table = self.tables[site]
            downs, table.downs[layer, slot] = [], at
            for part, pair in enumerate(pairs):
                table.ranks[layer, slot, part] = 0 if pair is None else pair.rank
                downs.append(None if pair is None else self._copy(at, pair.down))
                at += 0 if pair is None else pair.down.numel()
            table.ups[layer, slot] = at
            placed[layer, site], first = [], 0
            for pair, down, num_outputs in zip(pairs, downs, self._outputs[site], strict=True):
                if pair is not None and down is not None:
                    placed[layer, site].append(PlacedPart(first, LowRank(down, self._copy(at, pair.up))))
                    at += pair.up.numel()
                first += num_outputs
        self._parts[slot] = placed

    def _copy(self, at: int, matrix: Tensor) -> Tensor:
        """`matrix`, at its place in the room."""
        copied = self._flat[at : at + matrix.numel()].view_as(matrix)
        return copied.copy_(matrix)

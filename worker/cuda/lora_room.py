"""The memory of adapters' slots on a GPU: every matrix at its fixed place, as wide as the widest adapter may be.

Kernels find a slot's matrices by multiplication alone, so filling a slot changes numbers and no address: what was
captured goes on. Not for computing with them: `worker.cuda.lora` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planner.errors import InvalidAdapter
from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, LowRank, Site, SiteShape, site_shapes

RANK_BLOCK = 16
"""Ranks that kernels take at a time: the least that a matrix instruction does."""


class Zeros(Protocol):
    def __call__(self, *sizes: int, dtype: torch.dtype) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class SiteMatrices:
    """One slot's matrices at one site: `downs` [layers, P, R, K] and `ups` [layers, N, R] with the scale in them, zero
    beyond a part's rank; `ranks` int32[layers], the highest of the P parts, rounded up as R is. In the room with the
    slots in front."""

    downs: Tensor
    ups: Tensor
    ranks: Tensor

    @classmethod
    def made(cls, shape: SiteShape, room_rank: int, dtype: torch.dtype, zeros: Zeros) -> SiteMatrices:
        """`zeros` makes what lies in memory of whatever kind, with layers, or slots and layers, in front."""
        downs = zeros(len(shape.outputs), room_rank, shape.num_inputs, dtype=dtype)
        return cls(downs, zeros(shape.num_outputs, room_rank, dtype=dtype), zeros(dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class PackedLora:
    """An `AdapterMatrices`: laid out as a slot is, in memory that the device copies from by itself."""

    revision: int
    sites: Mapping[Site, SiteMatrices]


@dataclass(frozen=True, slots=True)
class SiteSizes:
    """What kernels are compiled for at one site: `down` for the first product, `up` for the second."""

    num_inputs: int
    outputs: tuple[int, ...]
    room_rank: int
    down: Mapping[str, int]
    up: Mapping[str, int]

    @classmethod
    def of(cls, shape: SiteShape, room: SiteMatrices) -> SiteSizes:
        """Of the whole room's matrices."""
        first, *rest = shape.outputs
        assert len(set(rest)) <= 1, "parts after the first have equally many columns"
        room_rank = room.ups.shape[-1]
        both = {"R": room_rank, "PARTS": len(shape.outputs), "RANK_STRIDE": room.ranks.stride(0)}
        down = {"K": shape.num_inputs, "DOWN_STRIDE": room.downs.stride(0)}
        up = {"N": shape.num_outputs, "FIRST": first, "REST": rest[0] if rest else 0, "UP_STRIDE": room.ups.stride(0)}
        return cls(shape.num_inputs, shape.outputs, room_rank, both | down, both | up)

    @property
    def num_parts(self) -> int:
        return len(self.outputs)

    def column_blocks(self, columns: int) -> int:
        """Blocks of so many columns, none across two parts."""
        return sum(-(-size // columns) for size in self.outputs)


class DeviceLoraRoom:
    """Owner: `CudaLoraSlots`. A slot is filled while nothing computes with it."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises torch's `OutOfMemoryError` where there is no room."""
        self.num_slots, self.max_rank, self.num_layers = num_slots, max_rank, config.num_layers
        self.room_rank = rounded_up(max_rank)
        self.dtype, self.device = dtype, device
        self.shapes = site_shapes(config)

        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, config.num_layers, *sizes, dtype=dtype, device=device)

        self.sites = {
            site: SiteMatrices.made(shape, self.room_rank, dtype, zeros) for site, shape in self.shapes.items()
        }
        self.sizes = {site: SiteSizes.of(shape, self.sites[site]) for site, shape in self.shapes.items()}

    def pack(self, matrices: LoraMatrices) -> PackedLora:
        """On any thread. Matrices have no rank over the room's. Raises `InvalidAdapter` where a number is more than the
        room's dtype holds: it would be infinite in every answer."""

        def zeros(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(self.num_layers, *sizes, dtype=dtype, pin_memory=self.device.type == "cuda")

        packed = {
            site: SiteMatrices.made(shape, self.room_rank, self.dtype, zeros) for site, shape in self.shapes.items()
        }
        for (layer, site), pairs in matrices.products.items():
            into = packed[site]
            _lay_out(into, layer, pairs, self.shapes[site].outputs)
            if not (into.downs[layer].isfinite().all() and into.ups[layer].isfinite().all()):
                name = str(self.dtype).removeprefix("torch.")
                raise InvalidAdapter(
                    f"layer {layer} has numbers at {site.name.lower()}, scale included, that {name} does not hold",
                    param="lora_path",
                )
        return PackedLora(matrices.revision, packed)

    def fill(self, slot: int, packed: PackedLora) -> None:
        """Copy an adapter in, in place of what was there, on torch's current stream and without waiting for it. It
        takes no memory of the device."""
        for site, matrices in packed.sites.items():
            room = self.sites[site]
            room.downs[slot].copy_(matrices.downs, non_blocking=True)
            room.ups[slot].copy_(matrices.ups, non_blocking=True)
            room.ranks[slot].copy_(matrices.ranks, non_blocking=True)


def _lay_out(into: SiteMatrices, layer: int, pairs: tuple[LowRank | None, ...], outputs: tuple[int, ...]) -> None:
    first = 0
    for part, (pair, num_outputs) in enumerate(zip(pairs, outputs, strict=True)):
        if pair is not None:
            into.downs[layer, part, : pair.rank] = pair.down
            into.ups[layer, first : first + num_outputs, : pair.rank] = pair.up.T
        first += num_outputs
    into.ranks[layer] = rounded_up(max(pair.rank for pair in pairs if pair is not None))


def rounded_up(rank: int) -> int:
    """To whole blocks."""
    return -(-rank // RANK_BLOCK) * RANK_BLOCK

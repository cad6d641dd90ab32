"""Random adapters as they are after they were read, and weights with such an adapter merged into them."""

from __future__ import annotations

from dataclasses import replace

import torch

from worker.models.config import ModelConfig
from worker.models.lora import LoraMatrices, LowRank, Site, site_shapes
from worker.models.weights import DecoderWeights

_NAMES = {Site.QKV: "qkv", Site.OUTPUT: "output", Site.GATE_UP: "gate_up", Site.DOWN: "down"}


def random_matrices(
    config: ModelConfig, seed: int, ranks: tuple[int, ...], *, layers: int, strength: float = 1.0
) -> LoraMatrices:
    """Of the first so many layers; parts take turns with the ranks, and 0 is a part without matrices."""
    generator = torch.Generator().manual_seed(seed)
    products: dict[tuple[int, Site], tuple[LowRank | None, ...]] = {}
    for layer in range(layers):
        for site, shape in site_shapes(config).items():
            pairs: list[LowRank | None] = []
            for part, outputs in enumerate(shape.outputs):
                rank = ranks[(layer + part) % len(ranks)]
                down = torch.randn(rank, shape.num_inputs, generator=generator) / shape.num_inputs**0.5
                up = strength * torch.randn(rank, outputs, generator=generator)
                pairs.append(LowRank(down, up) if rank else None)
            if any(pairs):
                products[layer, site] = tuple(pairs)
    return LoraMatrices(seed, products)


def merged_weights(
    config: ModelConfig, weights: DecoderWeights, matrices: LoraMatrices, dtype: torch.dtype = torch.float32
) -> DecoderWeights:
    """float32 weights with an adapter, kept in `dtype`, added to them in the plainest way there is."""
    layers = list(weights.layers)
    for (index, site), pairs in matrices.products.items():
        matrix = getattr(layers[index], _NAMES[site]).float().clone()
        first = 0
        for pair, outputs in zip(pairs, site_shapes(config)[site].outputs, strict=True):
            if pair is not None:
                down, up = (half.to(matrix.device, dtype).double() for half in (pair.down, pair.up))
                matrix[first : first + outputs] += (up.T @ down).float()
            first += outputs
        layers[index] = replace(layers[index], **{_NAMES[site]: matrix})
    return replace(weights, layers=tuple(layers))

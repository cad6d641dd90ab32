"""Random weights of the right shapes, for tests and benchmarks without a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.weights import Become, DecoderWeights, LayerWeights, as_it_is

_STANDARD_DEVIATION = 0.02


def dummy_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int, become: Become = as_it_is
) -> DecoderWeights:
    """Matrices from N(0, 0.02), norms 1, biases 0. The same `seed` on the same kind of device gives the same."""
    # A torch generator takes seeds of 64 bits, the upper half as negative numbers.
    generator = torch.Generator(device).manual_seed(seed if seed < 2**63 else seed - 2**64)
    hidden, inner = config.hidden_size, config.intermediate_size
    query_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        weight = torch.empty((rows, columns), dtype=dtype, device=device)
        return weight.normal_(0, _STANDARD_DEVIATION, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    def zeros(size: int, wanted: bool) -> Tensor | None:
        return torch.zeros(size, dtype=dtype, device=device) if wanted else None

    embedding = matrix(config.vocab_size, hidden)
    layers = tuple(
        LayerWeights(
            attention_norm=ones(hidden),
            qkv=become("qkv", matrix(query_rows + 2 * kv_rows, hidden)),
            qkv_bias=zeros(query_rows + 2 * kv_rows, config.qkv_bias),
            query_norm=ones(config.head_dim) if config.qk_norm else None,
            key_norm=ones(config.head_dim) if config.qk_norm else None,
            output=become("output", matrix(hidden, query_rows)),
            output_bias=zeros(hidden, config.output_bias),
            mlp_norm=ones(hidden),
            gate_up=become("gate_up", matrix(2 * inner, hidden)),
            gate_up_bias=zeros(2 * inner, config.mlp_bias),
            down=become("down", matrix(hidden, inner)),
            down_bias=zeros(hidden, config.mlp_bias),
        )
        for _ in range(config.num_layers)
    )
    head = embedding if config.tied_head else matrix(config.vocab_size, hidden)
    return DecoderWeights(embedding, layers, ones(hidden), become("head", head))

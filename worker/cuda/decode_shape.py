"""The model as the GPU decode step sees it: sizes and flags only, from a model's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.config import Quantization
from worker.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sizes of a Llama-like decoder (Llama, Mistral, Qwen2, Qwen3).

    `windows[i]`: positions that a token attends to in layer i, itself included; None is the whole past. `context`:
    rows of the rotary tables and most positions of a sequence. `qk_norm`: RMS norm over each query and key head before
    the rotation. `output_bias` is attention's output projection's, `mlp_bias` gate's, up's and down's. `quantization`:
    of the layers' matrices.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    context: int
    norm_eps: float
    dtype: torch.dtype
    windows: tuple[int | None, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    quantization: Quantization = "none"

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def plain_halves(self) -> bool:
        """Whether the layers' matrices are nothing but numbers of two bytes."""
        return self.quantization == "none" and self.dtype in (torch.bfloat16, torch.float16)

    @property
    def bits(self) -> int | None:
        """Of packed matrices; None of others."""
        return {"int8": 8, "int4": 4}.get(self.quantization)

    @property
    def most_attended(self) -> int:
        """Positions that a token attends to at most, in the layer that looks back farthest."""
        return max(self.context if window is None else window for window in self.windows)

    @property
    def query_columns(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_columns(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def decode_shape(
    config: ModelConfig, context: int, dtype: torch.dtype, quantization: Quantization = "none"
) -> DecodeShape:
    """`context` may be less than the model's: it is what tables are made for."""
    return DecodeShape(
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn=config.intermediate_size,
        vocab_size=config.vocab_size,
        context=context,
        norm_eps=config.norm_eps,
        dtype=dtype,
        windows=config.windows,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        mlp_bias=config.mlp_bias,
        quantization=quantization,
    )

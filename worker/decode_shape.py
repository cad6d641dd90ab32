"""The model as the GPU decode step sees it: its sizes, and its weights in fused layout. Values only, no arithmetic.

Loading and fusing weights is the models' business; nothing here reads a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Sizes of a Llama-like decoder (Llama, Mistral, Qwen2, Qwen3).

    `window`: positions a token attends to, itself included; None is the whole past. `qk_norm`: RMS norm over each
    query and key head before the rotation. `context`: rows of the rotary tables and most positions of a sequence.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    context: int
    norm_eps: float
    dtype: torch.dtype
    window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        assert self.num_heads % self.num_kv_heads == 0, (self.num_heads, self.num_kv_heads)
        assert self.head_dim % 2 == 0, self.head_dim
        assert self.window is None or self.window >= 1, self.window

    @property
    def query_columns(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def qkv_columns(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer, each tensor contiguous in the model's dtype; a linear is `[columns out, columns in]`.

    `qkv` [(heads + 2 kv_heads) * head_dim, hidden]: queries, then keys, then values. `gate_up` [2 * ffn, hidden]: the
    gate's rows, then up's. `down` [hidden, ffn]. `qkv_bias`, `q_norm` and `k_norm` are None where the model has none.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecodeWeights:
    """All weights: `embedding` and `head` [vocab, hidden] (the same tensor when tied), `cos` and `sin` float32
    [context, head_dim / 2] for the rotation of halves."""

    layers: Sequence[LayerWeights]
    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

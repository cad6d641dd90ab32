"""One decoder for Llama, Mistral, Qwen2 and Qwen3. A forward gets all that it reads as arguments.

It does not know where keys and values are kept: an `Attention` made for the forward stores them and attends.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from worker.models.config import ModelConfig
from worker.models.layers import rms_norm, rotate
from worker.models.lora import Site
from worker.models.rope_tables import rope_tables
from worker.models.weights import DecoderWeights, LayerWeights


class Attention(Protocol):
    """Keys and values of one forward's sequences. Made for a forward, used once a layer in order, then thrown away."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store `key` and `value` [T, J, D] of the forward's tokens, then attend with `query` [T, H, D].

        Each token sees its own sequence's positions up to its own, within the layer's window. Returns [T, H, D].
        """
        ...


class Beside(Protocol):
    """What is computed beside the decoder's own matrices for some rows of one forward."""

    def add(self, layer: int, site: Site, x: Tensor, product: Tensor) -> None:
        """Add its part to `product` [T, N], which the layer's matrix at `site` made of `x` [T, K]."""
        ...


class Decoder:
    """Weights and the maths over them. Immutable after it was made; safe to share between threads."""

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        context: int,
        rotary: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """`context`: positions that tables are made for; no forward may go beyond it. `rotary`: these tables, cosine
        and sine [context, D / 2], where they were made before."""
        self.config = config
        self.weights = weights
        self.context = context
        like = weights.embedding
        cos, sin = rotary if rotary is not None else rope_tables(config.rope, config.head_dim, context)
        self.cos = cos.to(like.device, like.dtype)
        self.sin = sin.to(like.device, like.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention, beside: Beside | None = None) -> Tensor:
        """Run all layers over `tokens` int64[T] at `positions` int64[T]. Returns [T, E], before the last norm."""
        hidden_te = functional.embedding(tokens, self.weights.embedding)
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        for index, layer in enumerate(self.weights.layers):
            normed = rms_norm(hidden_te, layer.attention_norm, self.config.norm_eps)
            hidden_te.add_(self._attention(index, layer, normed, cos, sin, attention, beside))
            normed = rms_norm(hidden_te, layer.mlp_norm, self.config.norm_eps)
            hidden_te.add_(_gated_mlp(index, layer, normed, beside))
        return hidden_te

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of selected rows: `hidden` [K, E] to float32[K, vocab_size]."""
        return functional.linear(self.normed(hidden), self.weights.head).float()

    def normed(self, hidden: Tensor) -> Tensor:
        """What the model knows of each row: `hidden` [K, E] behind the last norm."""
        return rms_norm(hidden, self.weights.final_norm, self.config.norm_eps)

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: Attention,
        beside: Beside | None,
    ) -> Tensor:
        config = self.config
        num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
        heads = _product(index, layer, Site.QKV, normed, beside)
        heads = heads.view(-1, num_heads + 2 * num_kv_heads, config.head_dim)
        query_key, value = heads[:, : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query_key = torch.cat(
                (
                    rms_norm(query_key[:, :num_heads], layer.query_norm, config.norm_eps),
                    rms_norm(query_key[:, num_heads:], layer.key_norm, config.norm_eps),
                ),
                dim=1,
            )
        query_key = rotate(query_key, cos, sin)
        mixed = attention.attend(index, query_key[:, :num_heads], query_key[:, num_heads:], value)
        return _product(index, layer, Site.OUTPUT, mixed.flatten(1), beside)


def matrix_at(layer: LayerWeights, site: Site) -> tuple[Tensor, Tensor | None]:
    """The matrix that makes a layer's product, and its bias."""
    match site:
        case Site.QKV:
            return layer.qkv, layer.qkv_bias
        case Site.OUTPUT:
            return layer.output, layer.output_bias
        case Site.GATE_UP:
            return layer.gate_up, layer.gate_up_bias
        case Site.DOWN:
            return layer.down, layer.down_bias


def _product(index: int, layer: LayerWeights, site: Site, x: Tensor, beside: Beside | None) -> Tensor:
    product = functional.linear(x, *matrix_at(layer, site))
    if beside is not None:
        beside.add(index, site, x, product)
    return product


def _gated_mlp(index: int, layer: LayerWeights, x: Tensor, beside: Beside | None) -> Tensor:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)) for x [T, E]."""
    gate_tf, up_tf = _product(index, layer, Site.GATE_UP, x, beside).chunk(2, dim=-1)
    return _product(index, layer, Site.DOWN, functional.silu(gate_tf).mul_(up_tf), beside)

"""A decode step in plain float32 torch, for judging the kernels, and random models to run both on.

Nothing here shares code with what it judges: one row at a time, a dense softmax, no cells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.decode_shape import DecodeShape, DecodeWeights, LayerWeights


def random_weights(shape: DecodeShape, device: torch.device, seed: int = 0) -> DecodeWeights:
    """Weights whose activations stay near unit size, norms near one, and the rotary tables of theta 10,000."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int, std: float, mean: float = 0.0) -> torch.Tensor:
        made = torch.empty(*sizes, dtype=shape.dtype, device=device)
        return made.normal_(mean, std, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return normal(size, std=0.1, mean=1.0)

    def layer() -> LayerWeights:
        return LayerWeights(
            input_norm=norm(shape.hidden),
            qkv=normal(shape.qkv_columns, shape.hidden, std=shape.hidden**-0.5),
            o=normal(shape.hidden, shape.query_columns, std=shape.query_columns**-0.5),
            post_norm=norm(shape.hidden),
            gate_up=normal(2 * shape.ffn, shape.hidden, std=shape.hidden**-0.5),
            down=normal(shape.hidden, shape.ffn, std=shape.ffn**-0.5),
            qkv_bias=normal(shape.qkv_columns, std=0.5) if shape.qkv_bias else None,
            q_norm=norm(shape.head_dim) if shape.qk_norm else None,
            k_norm=norm(shape.head_dim) if shape.qk_norm else None,
        )

    half = shape.head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * frequencies
    return DecodeWeights(
        layers=[layer() for _ in range(shape.num_layers)],
        embedding=normal(shape.vocab_size, shape.hidden, std=1.0),
        final_norm=norm(shape.hidden),
        head=normal(shape.vocab_size, shape.hidden, std=shape.hidden**-0.5),
        cos=angles.cos().float().to(device),
        sin=angles.sin().float().to(device),
    )


@dataclass
class History:
    """The float32 keys (rotated) and values of one sequence: per layer [positions, kv_heads, head_dim]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.keys[0])


def reference_step(shape: DecodeShape, weights: DecodeWeights, token: int, history: History) -> torch.Tensor:
    """float32 logits [vocab] after `token`; the history grows by its keys and values."""
    position = len(history)
    x = weights.embedding[token].float()
    for index, layer in enumerate(weights.layers):
        qkv = layer.qkv.float() @ _normed(x, layer.input_norm, shape.norm_eps)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias.float()
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q, k, v = torch.split(qkv.view(-1, shape.head_dim), heads)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _normed(q, layer.q_norm, shape.norm_eps), _normed(k, layer.k_norm, shape.norm_eps)
        q, k = _rotated(q, weights, position), _rotated(k, weights, position)
        keys = history.keys[index] = torch.cat([history.keys[index], k[None]])
        values = history.values[index] = torch.cat([history.values[index], v[None]])
        first = 0 if shape.window is None else max(0, position + 1 - shape.window)
        group = shape.num_heads // shape.num_kv_heads
        keys, values = keys[first:].repeat_interleave(group, 1), values[first:].repeat_interleave(group, 1)
        scores = torch.einsum("hd,phd->hp", q, keys) * shape.head_dim**-0.5
        attended = torch.einsum("hp,phd->hd", scores.softmax(-1), values).reshape(-1)
        x = x + layer.o.float() @ attended
        gate, up = torch.split(layer.gate_up.float() @ _normed(x, layer.post_norm, shape.norm_eps), shape.ffn)
        x = x + layer.down.float() @ (torch.nn.functional.silu(gate) * up)
    return weights.head.float() @ _normed(x, weights.final_norm, shape.norm_eps)


def in_float32(weights: DecodeWeights) -> DecodeWeights:
    """The same values as float32 tensors, so that many reference steps convert them once."""

    def layer(w: LayerWeights) -> LayerWeights:
        made: dict[str, Any] = {
            name: None if getattr(w, name) is None else getattr(w, name).float() for name in LayerWeights.__slots__
        }
        return LayerWeights(**made)

    return replace(
        weights,
        layers=[layer(w) for w in weights.layers],
        embedding=weights.embedding.float(),
        final_norm=weights.final_norm.float(),
        head=weights.head.float(),
    )


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: torch.Tensor, weights: DecodeWeights, position: int) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = weights.cos[position], weights.sin[position]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

"""A decode step in plain float32 torch, for judging the kernels, and random models to run both on.

Nothing here shares code with what it judges: one row at a time, a dense softmax, no cells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from worker.cuda.decode_shape import DecodeShape
from worker.cuda.fp8 import Fp8Matrix
from worker.cuda.packed import values_of
from worker.models.weights import DecoderWeights, LayerWeights


def random_weights(shape: DecodeShape, device: torch.device, seed: int = 0) -> DecoderWeights:
    """Weights whose activations stay near unit size, with norms near one."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*sizes: int, std: float, mean: float = 0.0) -> torch.Tensor:
        made = torch.empty(*sizes, dtype=shape.dtype, device=device)
        return made.normal_(mean, std, generator=generator)

    def norm(size: int) -> torch.Tensor:
        return normal(size, std=0.1, mean=1.0)

    def bias(size: int, wanted: bool) -> torch.Tensor | None:
        return normal(size, std=0.5) if wanted else None

    def layer() -> LayerWeights:
        return LayerWeights(
            attention_norm=norm(shape.hidden),
            qkv=normal(shape.qkv_columns, shape.hidden, std=shape.hidden**-0.5),
            qkv_bias=bias(shape.qkv_columns, shape.qkv_bias),
            query_norm=norm(shape.head_dim) if shape.qk_norm else None,
            key_norm=norm(shape.head_dim) if shape.qk_norm else None,
            output=normal(shape.hidden, shape.query_columns, std=shape.query_columns**-0.5),
            output_bias=bias(shape.hidden, shape.output_bias),
            mlp_norm=norm(shape.hidden),
            gate_up=normal(2 * shape.ffn, shape.hidden, std=shape.hidden**-0.5),
            gate_up_bias=bias(2 * shape.ffn, shape.mlp_bias),
            down=normal(shape.hidden, shape.ffn, std=shape.ffn**-0.5),
            down_bias=bias(shape.hidden, shape.mlp_bias),
        )

    return DecoderWeights(
        layers=tuple(layer() for _ in range(shape.num_layers)),
        embedding=normal(shape.vocab_size, shape.hidden, std=1.0),
        final_norm=norm(shape.hidden),
        head=normal(shape.vocab_size, shape.hidden, std=shape.hidden**-0.5),
    )


def rotary_tables(shape: DecodeShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of theta 10,000, float32 [context, head_dim / 2]."""
    half = shape.head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(shape.context, dtype=torch.float64)[:, None] * frequencies
    return angles.cos().float().to(device), angles.sin().float().to(device)


@dataclass
class History:
    """The float32 keys (rotated) and values of one sequence: per layer [positions, kv_heads, head_dim]."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __len__(self) -> int:
        return len(self.keys[0])


def reference_step(
    shape: DecodeShape,
    weights: DecoderWeights,
    rotary: tuple[torch.Tensor, torch.Tensor],
    token: int,
    history: History,
    stored: Callable[[torch.Tensor], torch.Tensor] = lambda heads: heads,
) -> torch.Tensor:
    """float32 logits [vocab] after `token`; the history grows by its keys and values, as `stored` leaves them."""
    position = len(history)

    def linear(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _linear(weight, rounded_row(x) if shape.quantization == "fp8" else x, bias)

    x = weights.embedding[token].float()
    for index, layer in enumerate(weights.layers):
        qkv = linear(layer.qkv, _normed(x, layer.attention_norm, shape.norm_eps), layer.qkv_bias)
        heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q, k, v = torch.split(qkv.view(-1, shape.head_dim), heads)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = _normed(q, layer.query_norm, shape.norm_eps), _normed(k, layer.key_norm, shape.norm_eps)
        q, k = _rotated(q, rotary, position), _rotated(k, rotary, position)
        keys = history.keys[index] = torch.cat([history.keys[index], stored(k[None])])
        values = history.values[index] = torch.cat([history.values[index], stored(v[None])])
        window = shape.windows[index]
        first = 0 if window is None else max(0, position + 1 - window)
        group = shape.num_heads // shape.num_kv_heads
        keys, values = keys[first:].repeat_interleave(group, 1), values[first:].repeat_interleave(group, 1)
        scores = torch.einsum("hd,phd->hp", q, keys) * shape.head_dim**-0.5
        attended = torch.einsum("hp,phd->hd", scores.softmax(-1), values).reshape(-1)
        x = x + linear(layer.output, attended, layer.output_bias)
        normed = _normed(x, layer.mlp_norm, shape.norm_eps)
        gate, up = torch.split(linear(layer.gate_up, normed, layer.gate_up_bias), shape.ffn)
        x = x + linear(layer.down, torch.nn.functional.silu(gate) * up, layer.down_bias)
    return weights.head.float() @ _normed(x, weights.final_norm, shape.norm_eps)


def in_float32(weights: DecoderWeights) -> DecoderWeights:
    """The same values as float32 tensors, so that many reference steps convert them once."""

    def layer(w: LayerWeights) -> LayerWeights:
        made: dict[str, Any] = {
            name: None if getattr(w, name) is None else _exact(getattr(w, name)) for name in LayerWeights.__slots__
        }
        return LayerWeights(**made)

    return replace(
        weights,
        layers=tuple(layer(w) for w in weights.layers),
        embedding=weights.embedding.float(),
        final_norm=weights.final_norm.float(),
        head=_exact(weights.head),
    )


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, Fp8Matrix):
        return tensor.codes.float() * tensor.scales[:, None]
    return values_of(tensor).float()


def rounded_row(x: torch.Tensor) -> torch.Tensor:
    """What a row of x [K] is to a product of fp8."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _linear(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return weight.float() @ x + (0.0 if bias is None else bias.float())


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _rotated(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], position: int) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    cos, sin = rotary[0][position], rotary[1][position]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

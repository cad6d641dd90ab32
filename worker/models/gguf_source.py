"""Reads a GGUF file: the configuration from its metadata, and its tensors dequantised, under transformers' names."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planner.errors import InvalidCheckpoint, UnsupportedModel
from worker.gguf_tensors import GgufTensors
from worker.models.blocks import Blocks
from worker.models.config import ModelConfig, check_gguf_architecture
from worker.models.gguf_blocks import blocks_of
from worker.models.rope import DivisorScaling, LinearScaling, Rope, RopeScaling, YarnScaling, yarn_magnitude

_FREQUENCY_DIVISORS = "rope_freqs.weight"
_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """A `TensorSource` over one file, and the configuration it carries. Keeps the file mapped while it lives."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidCheckpoint` for a damaged file, `UnsupportedModel` naming an option that is not handled."""
        self._file_name = path.name
        self._file = GgufTensors(path)
        self._tensors = self._file.tensors
        metadata = {
            key: value
            for key, value in self._file.metadata.items()
            if not key.startswith(("tokenizer.", "GGUF.", "general."))
        }
        self.config = self._config(str(self._file.metadata.get("general.architecture")), metadata)
        self._gguf_names = {_transformers_name(n): n for n in self._tensors if n != _FREQUENCY_DIVISORS}

    def names(self) -> Collection[str]:
        return self._gguf_names.keys()

    def read(self, name: str) -> Tensor:
        tensor = self._dequantised(self._gguf_names[name])
        if self.config.architecture != "llama":
            return tensor
        if ".q_proj." in name:
            return _half_split(tensor, self.config.num_heads)
        if ".k_proj." in name:
            return _half_split(tensor, self.config.num_kv_heads)
        return tensor

    def read_blocks(self, name: str) -> Blocks | None:
        """The matrix as it is stored, or None where it is not stored in blocks that can be kept."""
        kind, stored = self._file.stored(self._gguf_names[name])
        blocks = blocks_of(stored, kind)
        if blocks is None or self.config.architecture != "llama":
            return blocks
        num_heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        if num_heads is None:
            return blocks
        return blocks.in_order(_half_split(torch.arange(len(blocks.codes)), num_heads).numpy())

    def _dequantised(self, gguf_name: str) -> Tensor:
        values = self._file.read(gguf_name)
        # What was not quantised is the file itself, read-only, and torch wants an array that it may write to.
        return torch.from_numpy(np.array(values, dtype=np.float32, copy=not values.flags.writeable))

    def _config(self, architecture: str, metadata: dict[str, Any]) -> ModelConfig:
        check_gguf_architecture(architecture)
        options = {key.removeprefix(architecture + "."): value for key, value in metadata.items()}
        try:
            config = self._read_options(architecture, options)
        except KeyError as error:
            raise InvalidCheckpoint(f"{self._file_name} has no {architecture}.{error.args[0]}") from error
        unknown = sorted(key for key, value in options.items() if value)
        if unknown:
            raise UnsupportedModel(f"{self._file_name} sets {', '.join(unknown)}, which is not supported")
        return config

    def _read_options(self, architecture: str, options: dict[str, Any]) -> ModelConfig:
        """Takes what it understands out of `options`."""
        num_layers, hidden = options.pop("block_count"), options.pop("embedding_length")
        num_heads = options.pop("attention.head_count")
        head_dim = options.pop("attention.key_length", hidden // num_heads)
        context = options.pop("context_length")
        window = options.pop("attention.sliding_window", None)
        num_kv_heads = options.pop("attention.head_count_kv", num_heads)
        if options.pop("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel("attention.value_length other than attention.key_length is not supported")
        if options.pop("rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModel("rope.dimension_count other than the head's dimension is not supported")
        if isinstance(num_heads, list) or isinstance(num_kv_heads, list):
            raise UnsupportedModel("head counts that differ between layers are not supported")
        embedding = self._tensors.get("token_embd.weight")
        vocab_size = options.pop("vocab_size", None) or (embedding.shape[0] if embedding else 0)
        return ModelConfig(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=options.pop("feed_forward_length"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=options.pop("attention.layer_norm_rms_epsilon"),
            rope=Rope(options.pop("rope.freq_base", 10000.0), self._rope_scaling(options, context)),
            context=context,
            windows=(window or None,) * num_layers,
            tied_head="output.weight" not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            output_bias="blk.0.attn_output.bias" in self._tensors,
            mlp_bias="blk.0.ffn_down.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
        )

    def _rope_scaling(self, options: dict[str, Any], context: int) -> RopeScaling | None:
        kind = options.pop("rope.scaling.type", "none")
        factor = options.pop("rope.scaling.factor", 1.0)
        original = options.pop("rope.scaling.original_context_length", context)
        options.pop("rope.scaling.finetuned", None)
        attention_factor = options.pop("rope.scaling.attn_factor", 1.0)
        if _FREQUENCY_DIVISORS in self._tensors:
            if kind != "none":
                raise UnsupportedModel(f"{_FREQUENCY_DIVISORS} together with rope scaling {kind!r} is not supported")
            return DivisorScaling(tuple(self._dequantised(_FREQUENCY_DIVISORS).tolist()))
        match kind:
            case "none":
                return None
            case "linear":
                return LinearScaling(factor)
            case "yarn":
                return YarnScaling(factor, original, yarn_magnitude(factor) * attention_factor)
        raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported are none, linear and yarn")


def _transformers_name(gguf_name: str) -> str:
    if gguf_name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[gguf_name]
    match = _LAYER_NAME.fullmatch(gguf_name)
    if match is None or match[2] not in _IN_LAYER:
        return gguf_name  # an unknown name stays as it is, and is reported as unused
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _half_split(weight: Tensor, num_heads: int) -> Tensor:
    """Undo GGUF's order of rows for Llama: there rotary pairs are neighbours (2i, 2i + 1), here (i, i + D/2)."""
    pairs = weight.view(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)

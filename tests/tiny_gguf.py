"""Writes tiny models as GGUF files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

Types = Callable[[str], GGMLQuantizationType]


def write_gguf(
    model: Any, path: Path, *, architecture: str = "llama", types: Types | None = None, **extra: Any
) -> None:
    """The tiny model as llama.cpp's converter would write it: rotary pairs of Llama as neighbours.

    `types`: that of each matrix by its name in transformers; float32 without."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(16)
    writer.add_value_length(16)
    for key, value in extra.items():
        writer.add_string(f"{architecture}.{key}", value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = neighbours(name, tensor, config, architecture)
        if types is None or array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            packed = gguf.quants.quantize(array, types(name))
            writer.add_tensor(gguf_name(name), packed, raw_dtype=types(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    for ours, theirs in {
        "model.layers.": "blk.", "model.embed_tokens": "token_embd", "model.norm": "output_norm",
        "lm_head": "output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }.items():  # fmt: skip
        name = name.replace(ours, theirs)
    return name


def neighbours(name: str, tensor: torch.Tensor, config: Any, architecture: str) -> np.ndarray[Any, Any]:
    array = tensor.numpy()
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture != "llama" or heads is None:
        return array
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape).copy()

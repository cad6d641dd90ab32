"""Tiny random models of every supported architecture, saved as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}

# Name, configuration class, what differs from _SIZES. head_dim is 16, so 4 heads are wider than the hidden size.
TINY_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 16}),
    "llama_biased_tied": (
        "LlamaConfig",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama_llama3": ("LlamaConfig", {"head_dim": 16, "rope_parameters": _LLAMA3}),
    "llama_linear": ("LlamaConfig", {"head_dim": 16, "rope_parameters": _LINEAR}),
    "llama_yarn": ("LlamaConfig", {"head_dim": 16, "rope_parameters": _YARN}),
    "mistral_window": ("MistralConfig", {"head_dim": 16, "sliding_window": 9}),
    "qwen2": ("Qwen2Config", {"hidden_size": 64}),
    "qwen2_windows": (
        "Qwen2Config",
        {"hidden_size": 64, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
}


def save_tiny_model(name: str, folder: Path, *, sizes: dict[str, Any] | None = None, **saving: Any) -> Any:
    """Make the model, save config.json and safetensors into `folder`, and return it ready to generate.

    `sizes`: what else differs in its configuration."""
    class_name, changes = TINY_MODELS[name]
    config = getattr(transformers, class_name)(**{**_SIZES, **changes, **(sizes or {})}, attn_implementation="eager")
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms of one and biases of zero would hide a mistake
                parameter.normal_(1.0 if "norm" in parameter_name else 0.0, 0.2)
    model.save_pretrained(folder, **saving)
    return model


def greedy_answer(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers answers at temperature 0."""
    ids = torch.tensor([prompt])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens

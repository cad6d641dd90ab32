"""Random adapters as PEFT saves them, and models with such an adapter merged into their weights."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from worker.models.config import ModelConfig, read_config
from worker.models.lora import site_shapes

# What PEFT 0.17 writes of an adapter that was trained with its defaults.
CONFIG: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": "tiny",
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "peft_type": "LORA",
    "qalora_group_size": 16,
    "r": 4,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
}


def save_tiny_adapter(
    folder: Path, model: ModelConfig, seed: int, *, strength: float = 0.3, changes: dict[str, Any] | None = None
) -> Path:
    """Write an adapter for `model`; `changes` of its configuration. All layers have it."""
    config = CONFIG | (changes or {})
    modules = _modules(model)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (num_outputs, num_inputs) in modules.items():
        if name.rsplit(".", 1)[-1] not in config["target_modules"]:
            continue
        rank = rank_of(config, name)
        halves = {"A": (rank, num_inputs), "B": (num_outputs, rank)}
        for half, shape in halves.items():
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = strength * torch.randn(shape, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def save_merged(folder: Path, model: Path, adapter: Path) -> Path:
    """Write the checkpoint of `model` with the adapter added to its weights, in the plainest way there is."""
    folder.mkdir(parents=True)
    config = json.loads((adapter / "adapter_config.json").read_text())
    halves = load_file(adapter / "adapter_model.safetensors")
    weights = load_file(model / "model.safetensors")
    for name in _modules(read_config(model)):
        down, up = (halves.get(f"base_model.model.{name}.lora_{half}.weight") for half in "AB")
        if down is None or up is None:
            continue
        rank = len(down)
        weights[f"{name}.weight"] = weights[f"{name}.weight"].float() + scale_of(config, rank) * (up @ down)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((model / "config.json").read_text())
    return folder


def scale_of(config: dict[str, Any], rank: int) -> float:
    return float(config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank))


def rank_of(config: dict[str, Any], name: str) -> int:
    special: dict[str, int] = config["rank_pattern"]
    return next((rank for end, rank in special.items() if name.endswith(end)), int(config["r"]))


def _modules(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The projections of a model and their shapes."""
    shapes = {
        part: (outputs, shape.num_inputs)
        for site, shape in site_shapes(config).items()
        for part, outputs in zip(site.parts, shape.outputs, strict=True)
    }
    layers = [f"model.layers.{layer}" for layer in range(config.num_layers)]
    return {f"{layer}.{part}": shape for layer in layers for part, shape in shapes.items()}


ALL_MODULES: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

VARIANTS: Sequence[dict[str, Any]] = (
    {"target_modules": list(ALL_MODULES)},
    {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 8},
    {"target_modules": ["k_proj", "down_proj"], "use_rslora": True},
    {"target_modules": ["o_proj"], "r": 1},
    {"target_modules": ["up_proj", "gate_proj"], "r": 2, "lora_alpha": 32},
    {"target_modules": list(ALL_MODULES), "rank_pattern": {"q_proj": 7, "layers.1.mlp.up_proj": 3}},
    {"target_modules": ["up_proj", "v_proj"], "r": 16},
    {"target_modules": list(ALL_MODULES), "r": 3, "use_rslora": True, "lora_alpha": 1},
)
"""Eight kinds of adapters."""

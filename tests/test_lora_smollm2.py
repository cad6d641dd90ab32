"""SmolLM2 over its blocks, with eight adapters beside it, says what each of them says merged into the weights."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from planner.request import Adapter
from tests.tiny_adapters import VARIANTS, save_tiny_adapter, scale_of
from tests.torch_rig import Rig, executor_of, load, request
from worker.lora import LoraSlots
from worker.models.decoder import Decoder
from worker.models.weights import DecoderWeights, LayerWeights
from worker.program import Program

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 6
SIZES = (4, 9, 21, 33, 50, 64, 3, 100)


def test_eight_adapters_in_one_batch_say_what_each_says_merged(smollm2_path: Path, tmp_path: Path) -> None:
    program = load(os.fspath(smollm2_path))
    assert program.info.num_block_matrices > 0
    decoder = program.decoder
    slots = LoraSlots(decoder.config, 8, 16, decoder.dtype, decoder.device)
    random = np.random.default_rng(5)
    requests, folders = [], []
    for place, changes in enumerate(VARIANTS):
        folder = save_tiny_adapter(tmp_path / str(place), decoder.config, place, strength=0.1, changes=changes)
        matrices = slots.read(folder)
        adapter = Adapter(str(place), matrices.revision)
        slots.put(place, adapter, matrices)
        prompt = random.integers(0, program.info.vocab_size, size=SIZES[place]).tolist()
        requests.append(request(prompt, NUM_TOKENS, adapter=adapter))
        folders.append(folder)
    together = Rig(executor_of(program, 1024, adapters=slots)).answer(requests)
    chunked = Rig(executor_of(program, 1024, adapters=slots), prefill_chunk_tokens=8, max_batched_tokens=40)
    assert chunked.answer(requests) == together
    plain = load(os.fspath(smollm2_path), keep_blocks=False)
    num_different = 0
    for folder, asked, answer in zip(folders, requests, together, strict=True):
        (merged,) = Rig(executor_of(merged_program(plain, folder), 256)).answer([replace(asked, adapter=None)])
        assert answer == merged, folder.name
        (without,) = Rig(executor_of(program, 256)).answer([replace(asked, adapter=None)])
        num_different += answer != without
    assert num_different >= 7, "adapters that change nothing show nothing"


def merged_program(plain: Program, folder: Path) -> Program:
    decoder = plain.decoder
    weights = decoder.weights
    config = json.loads((folder / "adapter_config.json").read_text())
    halves = load_file(folder / "adapter_model.safetensors")
    layers = tuple(merged_layer(decoder, index, config, halves) for index in range(len(weights.layers)))
    merged = DecoderWeights(weights.embedding, layers, weights.final_norm, weights.head)
    return replace(plain, decoder=Decoder(decoder.config, merged, decoder.context, (decoder.cos, decoder.sin)))


def merged_layer(decoder: Decoder, index: int, config: dict[str, Any], halves: dict[str, torch.Tensor]) -> LayerWeights:
    layer, model = decoder.weights.layers[index], decoder.config
    query, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    rows = {
        "self_attn.q_proj": ("qkv", 0, query),
        "self_attn.k_proj": ("qkv", query, kv),
        "self_attn.v_proj": ("qkv", query + kv, kv),
        "self_attn.o_proj": ("output", 0, model.hidden_size),
        "mlp.gate_proj": ("gate_up", 0, model.intermediate_size),
        "mlp.up_proj": ("gate_up", model.intermediate_size, model.intermediate_size),
        "mlp.down_proj": ("down", 0, model.hidden_size),
    }
    changed = {field.name: getattr(layer, field.name) for field in fields(layer)}
    changed |= {name: changed[name].clone() for name in ("qkv", "output", "gate_up", "down")}
    for module, (name, first, size) in rows.items():
        down, up = halves_of(halves, f"model.layers.{index}.{module}")
        if down is not None and up is not None:
            changed[name][first : first + size] += scale_of(config, len(down)) * (up @ down)
    return LayerWeights(**changed)


def halves_of(halves: dict[str, torch.Tensor], module: str) -> Iterator[torch.Tensor | None]:
    return (halves.get(f"base_model.model.{module}.lora_{half}.weight") for half in "AB")

"""What of an adapter is refused, by name and with the reason, and that nothing is read over in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from planner.errors import InvalidAdapter
from tests.tiny_adapters import CONFIG, save_tiny_adapter
from tests.tiny_models import save_tiny_model
from worker.models.config import ModelConfig, read_config
from worker.models.lora import Site, read_lora
from worker.models.lora_config import lora_config

ANY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return folder


@pytest.fixture
def config(model: Path) -> ModelConfig:
    return read_config(model)


@pytest.fixture
def adapter(tmp_path: Path, model: Path) -> Path:
    return save_tiny_adapter(tmp_path / "adapter", read_config(model), 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "lora_only"}, "biases"),
        ({"lora_bias": True}, "lora_bias is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out is not supported"),
        ({"target_modules": ["q_proj", "lm_head", "embed_tokens"]}, "target_modules has embed_tokens, lm_head"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication is not supported"),
        ({"use_qalora": True}, "use_qalora is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own matrices"),
        ({"r": 0}, "r must be an integer of at least 1, not 0"),
        ({"r": True}, "r must be an integer"),
        ({"lora_alpha": "many"}, "lora_alpha must be a number above 0, not 'many'"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern has '(', which is no pattern"),
        ({"something_new": 3}, "something_new is not supported"),
    ],
)
def test_a_setting_that_would_change_the_maths_is_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidAdapter) as refusal:
        lora_config(CONFIG | changes)
    assert reason in refusal.value.message
    assert refusal.value.param == "lora_path"


def test_scales_and_ranks_follow_patterns_and_rslora() -> None:
    plain = lora_config(CONFIG | {"r": 4, "lora_alpha": 8})
    assert plain.scale_of("model.layers.0.self_attn.q_proj") == 2
    patterned = lora_config(
        CONFIG | {"r": 4, "lora_alpha": 8, "rank_pattern": {"q_proj": 16}, "alpha_pattern": {r"layers\.1\..*": 4}}
    )
    assert patterned.rank_of("model.layers.1.self_attn.q_proj") == 16
    assert patterned.rank_of("model.layers.1.self_attn.xq_proj") == 4
    assert patterned.scale_of("model.layers.1.self_attn.q_proj") == 4 / 16
    assert patterned.scale_of("model.layers.0.self_attn.q_proj") == 8 / 16
    assert lora_config(CONFIG | {"r": 16, "lora_alpha": 8, "use_rslora": True}).scale_of("x") == 2


def test_each_part_of_a_fused_matrix_has_its_own_pair(adapter: Path, config: ModelConfig) -> None:
    pairs = read_lora(adapter, config, 16).products[2, Site.QKV]
    halves = load_file(adapter / "adapter_model.safetensors")
    assert pairs[1] is None
    for pair, part in ((pairs[0], "q"), (pairs[2], "v")):
        name = f"base_model.model.model.layers.2.self_attn.{part}_proj.lora_"
        assert pair is not None
        torch.testing.assert_close(pair.up.T @ pair.down, 4 * halves[f"{name}B.weight"] @ halves[f"{name}A.weight"])
    assert (2, Site.DOWN) not in read_lora(adapter, config, 16).products


def test_the_revision_follows_the_bytes_and_not_the_place(adapter: Path, config: ModelConfig, tmp_path: Path) -> None:
    copied = adapter.rename(tmp_path / "elsewhere")
    revision = read_lora(copied, config, 16).revision
    tensors = load_file(copied / "adapter_model.safetensors")
    assert read_lora(copied, config, 16).revision == revision
    save_file({name: tensor + (name == ANY) for name, tensor in tensors.items()}, copied / "adapter_model.safetensors")
    assert read_lora(copied, config, 16).revision != revision


def changed(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    match how:
        case "no other half":
            del tensors[ANY.replace("lora_A", "lora_B")]
        case "wrong shape":
            tensors[ANY] = torch.zeros(4, 47)
        case "other rank":
            tensors[ANY] = torch.zeros(5, 48)
        case "another layer":
            tensors[ANY.replace("layers.0", "layers.9")] = torch.zeros(4, 48)
        case "another module":
            tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 48)
        case "magnitudes":
            tensors[ANY.replace("lora_A.weight", "lora_magnitude_vector")] = torch.zeros(64)
        case "integers":
            tensors[ANY] = torch.zeros(4, 48, dtype=torch.int32)
        case "not finite":
            tensors[ANY] = torch.full((4, 48), torch.inf)
        case "nothing":
            tensors = {}
    return tensors


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("no other half", f"{ANY} without the other half"),
        ("wrong shape", "of shape (4, 47) and torch.float32, not (4, 48)"),
        ("other rank", "of shape (5, 48)"),
        ("another layer", "the model has 3 layers"),
        ("another module", "lm_head.lora_A.weight, which is not one of a supported"),
        ("magnitudes", "lora_magnitude_vector"),
        ("integers", "torch.int32"),
        ("not finite", "not finite"),
        ("nothing", "has no tensor"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    adapter: Path, config: ModelConfig, how: str, reason: str
) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file(changed(load_file(path), how), path)
    with pytest.raises(InvalidAdapter) as refusal:
        read_lora(adapter, config, 16)
    assert reason in refusal.value.message


def test_a_rank_over_the_most_is_refused_with_both_numbers(adapter: Path, config: ModelConfig) -> None:
    with pytest.raises(InvalidAdapter, match=r"q_proj has rank 4, and max_lora_rank is 3"):
        read_lora(adapter, config, 3)


@pytest.mark.parametrize("damage", ["no folder", "no weights", "cut weights", "no json", "a list"])
def test_damaged_files_are_refused(adapter: Path, config: ModelConfig, damage: str) -> None:
    settings, weights = adapter / "adapter_config.json", adapter / "adapter_model.safetensors"
    match damage:
        case "no folder":
            adapter = adapter / "nowhere"
        case "no weights":
            weights.unlink()
        case "cut weights":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "no json":
            settings.write_text("{")
        case "a list":
            settings.write_text(json.dumps([1]))
    with pytest.raises(InvalidAdapter):
        read_lora(adapter, config, 16)

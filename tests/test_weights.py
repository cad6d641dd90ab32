"""A checkpoint is read whole or refused by name: configuration, safetensors and GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from planner.errors import InvalidCheckpoint, InvalidConfiguration, UnsupportedModel
from tests.tiny_gguf import write_gguf
from tests.tiny_models import greedy_answer, save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.config import EngineConfig
from worker.gguf_tensors import GgufTensors
from worker.models.config import model_config
from worker.models.rope import LinearScaling, YarnScaling
from worker.models.rope_tables import inverse_frequencies, rope_tables
from worker.program import load_program

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}
QWEN = {**CONFIG, "architectures": ["Qwen2ForCausalLM"]}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}}, "twist"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"sliding_window": 32}, "sliding_window"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_attention"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
    ],
)
def test_an_option_that_changes_the_maths_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        model_config({**CONFIG, **options})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_a_senseless_configuration_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidCheckpoint, match=named):
        model_config({**CONFIG, **options})


def test_options_that_are_off_or_do_not_matter_are_accepted() -> None:
    config = model_config({**CONFIG, "use_cache": False, "made_up": None, "rope_interleaved": False})
    assert (config.head_dim, config.windows, config.rope.scaling) == (12, (None, None), None)


def test_windows_follow_each_architectures_rule() -> None:
    mistral = {**CONFIG, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert model_config(mistral).windows == (8, 8)
    assert model_config({**mistral, "sliding_window": None}).windows == (None, None)
    windowed = {**QWEN, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert model_config(windowed).windows == (None, 8)
    assert model_config({**windowed, "use_sliding_window": False}).windows == (None, None)
    types = ["sliding_attention", "full_attention"]
    assert model_config({**windowed, "layer_types": types}).windows == (8, None)


def test_old_and_new_spelling_of_rope_scaling_agree() -> None:
    old = model_config({**CONFIG, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    new = model_config({**CONFIG, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}}).rope
    assert old == new
    assert old.scaling == LinearScaling(2.0)
    assert torch.equal(inverse_frequencies(old, 4)[:1], torch.tensor([0.5]))


def test_yarn_widens_the_context_and_scales_the_tables() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5}
    config = model_config({**CONFIG, "rope_scaling": scaling})
    assert config.context == 256
    assert isinstance(config.rope.scaling, YarnScaling)
    cos, _ = rope_tables(config.rope, 12, 8)
    assert cos[0].tolist() == [1.5] * 6


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny_model("llama", tmp_path)
    return tmp_path


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda tensors: tensors.pop(NORM), NORM),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(2)}), "model.extra"),
        (lambda tensors: tensors.update({NORM: torch.zeros(3)}), NORM),
        (lambda tensors: tensors.update({NORM: torch.zeros(48, dtype=torch.int32)}), NORM),
        (lambda tensors: tensors.update({NORM: torch.zeros(48, dtype=torch.float8_e4m3fn)}), NORM),
    ],
    ids=["missing", "left over", "another shape", "integers", "eight bits"],
)
def test_a_tensor_that_does_not_belong_is_named(
    checkpoint: Path, edit: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    edit_tensors(checkpoint, edit)
    with pytest.raises(InvalidCheckpoint, match=named):
        load(str(checkpoint))


def test_stored_rotary_frequencies_are_no_fault(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(checkpoint, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(str(checkpoint))


def test_a_stored_copy_of_a_tied_head_must_be_the_embedding(tmp_path: Path) -> None:
    save_tiny_model("qwen3", tmp_path)
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(str(tmp_path))
    edit_tensors(tmp_path, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    with pytest.raises(InvalidCheckpoint, match=r"lm_head\.weight"):
        load(str(tmp_path))


def test_a_truncated_file_is_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InvalidCheckpoint, match=r"model\.safetensors"):
        load(str(checkpoint))


def test_a_missing_or_foreign_shard_is_named(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path, max_shard_size="40KB")
    index = tmp_path / "model.safetensors.index.json"
    data = json.loads(index.read_text())
    shard = next(iter(data["weight_map"].values()))
    content = (tmp_path / shard).read_bytes()
    (tmp_path / shard).unlink()
    with pytest.raises(InvalidCheckpoint, match=shard):
        load(str(tmp_path))
    (tmp_path / shard).write_bytes(content)
    data["weight_map"][NORM] = "../elsewhere.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(InvalidCheckpoint, match="elsewhere"):
        load(str(tmp_path))


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_folder_without_a_readable_configuration_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidCheckpoint, match=r"config\.json"):
        load(str(tmp_path))


def test_lower_bound_of_a_prefill_must_lie_between_two_and_the_upper(checkpoint: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=r"\[2, max_prefill_tokens = 8\]"):
        load_program(EngineConfig(model=str(checkpoint), max_prefill_tokens=8, min_prefill_tokens=9))


@pytest.mark.parametrize(("name", "architecture"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_gguf_holds_the_same_model(tmp_path: Path, name: str, architecture: str) -> None:
    model = save_tiny_model(name, tmp_path)
    write_gguf(model, tmp_path / "tiny.gguf", architecture=architecture)
    program = load(str(tmp_path / "tiny.gguf"))
    assert (program.info.name, program.info.architecture) == ("tiny", architecture)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    rig = Rig(executor_of(program, 64))
    assert rig.answer([request(prompt, 10)]) == [[greedy_answer(model, prompt, 10)]]


def test_a_gguf_is_laid_out_as_its_own_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("odd", np.arange(15, dtype=np.float32).reshape(3, 5))
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(1, 2, 3))
    rows = np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64)
    writer.add_tensor(
        "packed", gguf.quantize(rows, gguf.GGMLQuantizationType.Q4_1), raw_dtype=gguf.GGMLQuantizationType.Q4_1
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufTensors(path), gguf.GGUFReader(path)
    assert ours.metadata["general.alignment"] == 128
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors] == ["odd", "half", "packed"]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].offset == tensor.data_offset
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(ours.read(tensor.name), expected)
        assert ours.read(tensor.name).shape == expected.shape == ours.tensors[tensor.name].shape


def test_gguf_options_that_are_not_handled_are_refused_by_name(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    write_gguf(model, tmp_path / "tiny.gguf", **{"pooling.kind": "odd"})
    with pytest.raises(UnsupportedModel, match=r"pooling\.kind"):
        load(str(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("kept_bytes", [0, 10, 300, 60_000])
def test_a_truncated_gguf_is_named(tmp_path: Path, kept_bytes: int) -> None:
    model = save_tiny_model("llama", tmp_path)
    path = tmp_path / "tiny.gguf"
    write_gguf(model, path)
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(InvalidCheckpoint, match=r"tiny\.gguf"):
        load(str(path))


def test_bfloat16_checkpoints_load_into_float32(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    answer = Rig(executor_of(load(str(tmp_path)), 64)).answer([request([1, 2, 3], 6)])
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert answer == [[greedy_answer(again, [1, 2, 3], 6)]]

"""What a decoder is made of, read from config.json. Everything that changes the maths is here or is refused by name.

Free of torch, so that a model can be refused before anything is started.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.errors import InvalidCheckpoint, UnsupportedModel
from worker.models.packing import Packing, read_packing
from worker.models.rope import LinearScaling, Llama3Scaling, Rope, RopeScaling, YarnScaling, yarn_magnitude

Json = Mapping[str, Any]
# What is left to understand: whoever understands an option takes it out.
Options = dict[str, Any]

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# Training, generation and provenance: no effect on a forward.
_HARMLESS_KEYS = """
    _name_or_path name_or_path transformers_version auto_map is_llama_config unsloth_fixed unsloth_version
    attention_dropout hidden_dropout embd_pdrop resid_pdrop attn_pdrop initializer_range pretraining_tp
    use_cache bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id max_length min_length
    _attn_implementation _attn_implementation_autoset chunk_size_feed_forward return_dict output_scores
    id2label label2id problem_type task_specific_params torchscript
"""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder of the Llama kind. `windows[i]` is layer i's sliding window in tokens, None for the full context.

    `context` is the most positions that the checkpoint was made for; `dtype` is the checkpoint's own, if it says;
    `packing` says how its matrices are packed, if they are.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    context: int
    windows: tuple[int | None, ...]
    tied_head: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str | None = None
    packing: Packing | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise InvalidCheckpoint(f"the model's {name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise InvalidCheckpoint(f"{self.num_heads} heads do not share {self.num_kv_heads} key/value heads evenly")
        if self.head_dim < 2 or self.head_dim % 2:
            raise InvalidCheckpoint(f"head_dim must be even for rotary embedding, not {self.head_dim}")
        if len(self.windows) != self.num_layers or any(w is not None and w < 1 for w in self.windows):
            raise InvalidCheckpoint(f"there must be one window of at least 1 a layer, not {self.windows}")


def read_config(folder: Path) -> ModelConfig:
    """The configuration of a checkpoint's folder. Raises as `model_config`."""
    try:
        data = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise InvalidCheckpoint(f"{folder} is neither a .gguf file nor a folder with config.json: {error}") from error
    except ValueError as error:
        raise InvalidCheckpoint(f"{folder / 'config.json'} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise InvalidCheckpoint(f"{folder / 'config.json'} does not hold an object")
    return model_config(data)


def check_gguf_architecture(name: object) -> None:
    """Raises `UnsupportedModel` unless a GGUF file's `general.architecture` is one that is handled."""
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} is not supported; supported are {', '.join(GGUF_ARCHITECTURES)}"
        )


def model_config(data: Json) -> ModelConfig:
    """Read the contents of a config.json (transformers 4 or 5 style).

    Raises `UnsupportedModel` naming what is not handled, `InvalidCheckpoint` naming what is missing or senseless.
    """
    options = {key: value for key, value in data.items() if key not in _HARMLESS_KEYS.split()}
    architecture = _architecture(options)
    hidden_size = _positive(options, "hidden_size")
    num_heads = _positive(options, "num_attention_heads")
    num_layers = _positive(options, "num_hidden_layers")
    context = _positive(options, "max_position_embeddings")
    rope = _rope(options, context)
    if isinstance(rope.scaling, YarnScaling):
        context = max(context, int(rope.scaling.factor * rope.scaling.original_context))
    attention_bias = architecture in ("llama", "qwen3") and bool(options.pop("attention_bias", False))
    packed = options.pop("quantization_config", None)
    dtype, old_dtype = options.pop("dtype", None), options.pop("torch_dtype", None)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=_positive(options, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(options, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_positive(options, "num_key_value_heads", num_heads),
        head_dim=_positive(options, "head_dim", 128 if architecture == "qwen3" else hidden_size // num_heads),
        norm_eps=float(options.pop("rms_norm_eps", 1e-6)),
        rope=rope,
        context=context,
        windows=_windows(options, architecture, num_layers),
        tied_head=bool(options.pop("tie_word_embeddings", False)),
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=architecture == "llama" and bool(options.pop("mlp_bias", False)),
        qk_norm=architecture == "qwen3",
        dtype=dtype or old_dtype,
        packing=None if packed is None else read_packing(packed),
    )
    if options.pop("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"hidden_act {data['hidden_act']!r} is not supported; only silu is")
    # An option that nobody took may change the maths, so it is refused unless it is off.
    for key, value in sorted(options.items()):
        if value:
            raise UnsupportedModel(f"config.json sets {key} = {value!r}, which is not supported for {architecture}")
    return config


def _architecture(options: Options) -> str:
    names, model_type = options.pop("architectures", None) or [], options.pop("model_type", None)
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names and model_type in ARCHITECTURES.values():
        return str(model_type)
    named = ", ".join(map(str, names)) or f"model_type {model_type}"
    raise UnsupportedModel(f"{named} is not supported; supported are {', '.join(ARCHITECTURES)}")


def _positive(options: Options, key: str, default: int | None = None) -> int:
    value = options.pop(key, None)
    if value is None:
        value = default
    if value is None:
        raise InvalidCheckpoint(f"config.json has no {key}")
    if not isinstance(value, int) or value < 1:
        raise InvalidCheckpoint(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _windows(options: Options, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    kinds = options.pop("layer_types", None)
    window, first_windowed = None, 0
    if architecture == "mistral":
        window = options.pop("sliding_window", 4096)  # transformers' default where the key is absent
    elif architecture.startswith("qwen"):
        in_use, size = options.pop("use_sliding_window", False), options.pop("sliding_window", 4096)
        window, first_windowed = size if in_use else None, int(options.pop("max_window_layers", 28))
    if kinds is None:
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise InvalidCheckpoint(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    windows = []
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModel(f"layer_types has {kind!r}, which is not supported")
        if kind == "sliding_attention" and window is None:
            raise UnsupportedModel("layer_types has sliding_attention, but no sliding_window is in use")
        if kind == "full_attention" and window is not None and architecture == "mistral":
            raise UnsupportedModel("layer_types mixes full_attention into Mistral, which is not supported")
        windows.append(window if kind == "sliding_attention" else None)
    return tuple(windows)


def _rope(options: Options, context: int) -> Rope:
    # Version 5 of transformers writes rope_parameters; before it there were rope_theta and rope_scaling.
    old, new = options.pop("rope_scaling", None) or {}, options.pop("rope_parameters", None) or {}
    old_theta = options.pop("rope_theta", None)
    if old and new and dict(old) != dict(new):
        raise InvalidCheckpoint("config.json has both rope_scaling and rope_parameters, and they differ")
    rules = dict(new or old)
    if any(isinstance(value, Mapping) for value in rules.values()):
        raise UnsupportedModel("rope_parameters per layer type are not supported")
    theta = float(rules.pop("rope_theta", None) or old_theta or 10000.0)
    if rules.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    legacy_kind = rules.pop("type", None)
    kind = rules.pop("rope_type", legacy_kind) or "default"
    try:
        scaling = _scaling(kind, rules, context)
    except KeyError as error:
        raise InvalidCheckpoint(f"rope scaling {kind!r} has no {error.args[0]}") from error
    if rules:
        raise UnsupportedModel(f"rope scaling {kind!r} with {', '.join(sorted(rules))} is not supported")
    return Rope(theta, scaling)


def _scaling(kind: str, rules: Options, context: int) -> RopeScaling | None:
    """Takes what it understands out of `rules`."""
    original = rules.pop("original_max_position_embeddings", None) or context
    match kind:
        case "default":
            rules.pop("factor", None)
            return None
        case "linear":
            return LinearScaling(float(rules.pop("factor")))
        case "llama3":
            return Llama3Scaling(
                factor=float(rules.pop("factor")),
                low_freq_factor=float(rules.pop("low_freq_factor")),
                high_freq_factor=float(rules.pop("high_freq_factor")),
                original_context=int(original),
            )
        case "yarn":
            return _yarn(rules, int(original), context)
    raise UnsupportedModel(f"rope scaling {kind!r} is not supported; supported are default, linear, llama3 and yarn")


def _yarn(rules: Options, original: int, context: int) -> YarnScaling:
    factor = float(rules.pop("factor", None) or context / original)
    scale, all_dims = rules.pop("mscale", None), rules.pop("mscale_all_dim", None)
    magnitude = rules.pop("attention_factor", None)
    if magnitude is None:
        magnitude = yarn_magnitude(factor)
        if scale and all_dims:
            magnitude = yarn_magnitude(factor, scale) / yarn_magnitude(factor, all_dims)
    return YarnScaling(
        factor=factor,
        original_context=original,
        magnitude=float(magnitude),
        beta_fast=float(rules.pop("beta_fast", None) or 32.0),
        beta_slow=float(rules.pop("beta_slow", None) or 1.0),
        truncate=bool(rules.pop("truncate", True)),
    )

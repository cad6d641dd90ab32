"""What an adapter_config.json of PEFT says. Everything that changes the maths is here or is refused by name.

Free of torch. Low-rank adaptation: Hu et al. 2021; the other scale of `use_rslora`: Kalajdzievski 2023.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from planner.errors import InvalidAdapter

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# Of training or provenance; or what names modules, which the tensors themselves do.
_HARMLESS_KEYS: Final = """
    auto_mapping base_model_name_or_path revision inference_mode task_type peft_version lora_dropout exclude_modules
    layers_pattern layers_to_transform megatron_core loftq_config eva_config corda_config ensure_weight_tying
    runtime_config qalora_group_size
"""
# Ways of beginning that change the model's own matrices, so that what was trained does not fit these.
_CHANGING_BEGINNINGS: Final = ("pissa", "olora", "corda", "loftq")

Patterns = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The rank of every matrix and what its product is multiplied by, but for modules that a pattern names: the first
    that matches the end of the module's name holds."""

    rank: int
    alpha: float
    scales_by_root: bool
    rank_patterns: Patterns = ()
    alpha_patterns: Patterns = ()

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_patterns, module, self.rank))

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _matching(self.alpha_patterns, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.scales_by_root else rank)


def read_lora_config(folder: Path) -> LoraConfig:
    """Raises `InvalidAdapter` that names what is missing, senseless or not supported."""
    path = folder / CONFIG_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidAdapter(f"{folder} is no adapter of PEFT: {error}", param="lora_path") from error
    except ValueError as error:
        raise InvalidAdapter(f"{path} is not JSON: {error}", param="lora_path") from error
    if not isinstance(data, dict):
        raise InvalidAdapter(f"{path} does not hold an object", param="lora_path")
    return lora_config(data)


def lora_config(data: Mapping[str, Any]) -> LoraConfig:
    """Read the contents of an adapter_config.json; raises as `read_lora_config`."""
    options = {key: value for key, value in data.items() if key not in _HARMLESS_KEYS.split()}
    if (kind := options.pop("peft_type", None)) != "LORA":
        raise _refused(f"peft_type is {kind!r}; only LORA is supported")
    _check_modules(options.pop("target_modules", None))
    _check_beginning(options.pop("init_lora_weights", True))
    if options.pop("bias", "none") != "none":
        raise _refused("it was trained with biases (bias), which are not supported")
    rank, alpha = options.pop("r", None), options.pop("lora_alpha", None)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _refused(f"r must be an integer of at least 1, not {rank!r}")
    config = LoraConfig(
        rank=rank,
        alpha=_number("lora_alpha", alpha),
        scales_by_root=bool(options.pop("use_rslora", False)),
        rank_patterns=_patterns("rank_pattern", options),
        alpha_patterns=_patterns("alpha_pattern", options),
    )
    left = sorted(key for key, value in options.items() if value)  # null, false and empty ones change nothing
    if left:
        raise _refused(f"{', '.join(left)} is not supported")
    return config


def _check_modules(targets: object) -> None:
    """Named ones must be known; a pattern or "all-linear" is judged by the tensors that there are."""
    names = targets if isinstance(targets, list) else []
    unknown = sorted(str(name) for name in names if str(name).rsplit(".", 1)[-1] not in PROJECTIONS)
    if unknown:
        raise _refused(f"target_modules has {', '.join(unknown)}; supported are {', '.join(PROJECTIONS)}")


def _check_beginning(way: object) -> None:
    if isinstance(way, str) and way.lower().startswith(_CHANGING_BEGINNINGS):
        raise _refused(
            f"init_lora_weights is {way!r}, which changes the model's own matrices; convert it to plain LoRA first"
        )


def _patterns(name: str, options: dict[str, Any]) -> Patterns:
    given = options.pop(name, None) or {}
    if not isinstance(given, dict):
        raise _refused(f"{name} must map names of modules to numbers")
    for pattern in given:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refused(f"{name} has {pattern!r}, which is no pattern: {error}") from error
    return tuple((pattern, _number(f"{name}[{pattern!r}]", value)) for pattern, value in given.items())


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _refused(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def _matching(patterns: Patterns, module: str, default: float) -> float:
    return next((value for pattern, value in patterns if re.fullmatch(rf"(.*\.)?({pattern})", module)), default)


def _refused(why: str) -> InvalidAdapter:
    return InvalidAdapter(f"{CONFIG_FILE}: {why}", param="lora_path")

"""What settings ask that the model, or the kind of device, has not: told without loading anything. Free of torch.

`worker.program` begins with it, and `raycomb serve` asks it before there is a worker at all.
"""

from __future__ import annotations

from typing import Literal

from planner.errors import InvalidConfiguration
from worker.config import EngineConfig, Quantization


def check_settings(config: EngineConfig, context: int, device: Literal["cpu", "cuda"] | None) -> None:
    """Raises `InvalidConfiguration` that names the setting and the numbers.

    * `context`: tokens that the model was made for.
    * `device`: where it will run; None: that is not known yet, and what depends on it is left to others.
    """
    context_of(config, context)
    min_prefill_of(config)
    if device == "cpu":
        _check_on_cpu(config)
    elif device == "cuda" and config.quantization == "fp8" and config.dtype not in ("auto", "bfloat16"):
        raise InvalidConfiguration(f"fp8 computes in bfloat16, not {config.dtype}", param="dtype")


def context_of(config: EngineConfig, context: int) -> int:
    """The most tokens of a sequence: the model's own `context`, or fewer where the operator says so. Raises
    `InvalidConfiguration`."""
    if config.max_model_len is None:
        return context
    if config.max_model_len > context:
        raise InvalidConfiguration(
            f"max_model_len is {config.max_model_len}, but the model was made for {context} tokens at most",
            param="max_model_len",
        )
    return config.max_model_len


def least_prefill(quantization: Quantization) -> int:
    """The m that matrices allow at least. Kernels of weight-only products change with the number of rows: a small one
    for up to four, a tiled one above."""
    return 5 if quantization in ("int8", "int4") else 2


def min_prefill_of(config: EngineConfig) -> int:
    """The m that was asked for, or the least that the matrices allow. Raises `InvalidConfiguration`."""
    least = least_prefill(config.quantization)
    if "min_prefill_tokens" not in config.model_fields_set:
        return max(config.min_prefill_tokens, least)
    if config.min_prefill_tokens < least:
        raise InvalidConfiguration(
            f"min_prefill_tokens must be at least {least} with {config.quantization} weights, whose kernels change "
            f"with the number of rows; not {config.min_prefill_tokens}",
            param="min_prefill_tokens",
        )
    return config.min_prefill_tokens


def _check_on_cpu(config: EngineConfig) -> None:
    if config.quantization == "fp8":
        raise InvalidConfiguration(
            "quantization is fp8, which needs a GPU of compute capability 8.9 or more, and the device is cpu; int8 and "
            "int4 work on any device",
            param="quantization",
        )
    own = "float32" if config.dtype == "auto" else config.dtype
    if config.kv_cache_dtype not in ("auto", own):
        raise InvalidConfiguration(
            f"kv_cache_dtype is {config.kv_cache_dtype}, and on a CPU keys and values are kept in the model's own "
            f"numbers, which are {own}",
            param="kv_cache_dtype",
        )
    if config.kv_initial_cells is not None:
        raise InvalidConfiguration(
            f"kv_initial_cells is {config.kv_initial_cells}, and only a pool on a GPU grows: on a CPU cells take no "
            "memory before they are written",
            param="kv_initial_cells",
        )

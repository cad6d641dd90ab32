"""What settings ask that the model, or the kind of device, has not: told without loading anything. Free of torch.

`worker.program` refuses the same where it comes to it; `tests/test_settings_check.py` holds the two together.
"""

from __future__ import annotations

from typing import Final, Literal

from planner.errors import InvalidConfiguration
from worker.config import EngineConfig

LEAST_PREFILL_OF_CODES: Final = 5
"""The m of weights of eight and four bits, whose kernels change with the number of rows."""


def check_settings(config: EngineConfig, context: int, device: Literal["cpu", "cuda"] | None) -> None:
    """Raises `InvalidConfiguration` that names the setting and the numbers.

    * `context`: tokens that the model was made for.
    * `device`: where it will run; None: that is not known yet, and what depends on it is left to others.
    """
    if config.max_model_len is not None and config.max_model_len > context:
        raise InvalidConfiguration(
            f"max_model_len is {config.max_model_len}, but the model was made for {context} tokens at most",
            param="max_model_len",
        )
    is_of_codes = config.quantization in ("int8", "int4")
    told_m = "min_prefill_tokens" in config.model_fields_set
    if is_of_codes and told_m and config.min_prefill_tokens < LEAST_PREFILL_OF_CODES:
        raise InvalidConfiguration(
            f"min_prefill_tokens must be at least {LEAST_PREFILL_OF_CODES} with {config.quantization} weights, whose "
            f"kernels change with the number of rows; not {config.min_prefill_tokens}",
            param="min_prefill_tokens",
        )
    if device == "cpu":
        _check_on_cpu(config)


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

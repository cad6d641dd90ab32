"""What settings may ask of a program, which was compiled for others. Free of torch."""

from __future__ import annotations

from planner.errors import InvalidConfiguration, InvalidProgram
from worker.config import EngineConfig
from worker.programs.metadata import ProgramMetadata


def check_asked(metadata: ProgramMetadata, config: EngineConfig) -> None:
    """Raises `InvalidConfiguration` where they ask for another program, or for more than it has."""
    for name in ("device", "dtype", "quantization"):
        asked, made = getattr(config, name), getattr(metadata, name)
        if name in config.model_fields_set and asked not in ("auto", made):
            raise InvalidConfiguration(f"{name} {asked} was asked for, and the program was made for {made}", param=name)
    if config.enable_lora:
        raise InvalidConfiguration("enable_lora is not supported by an exported program yet", param="enable_lora")
    if config.kv_cache_dtype not in ("auto", metadata.dtype):
        raise InvalidConfiguration(
            f"kv_cache_dtype is {config.kv_cache_dtype}, and a program keeps keys and values in its own numbers, which "
            f"are {metadata.dtype}",
            param="kv_cache_dtype",
        )
    if config.load_format == "dummy":
        raise InvalidConfiguration(
            "a program has its weights: load_format dummy means nothing here", param="load_format"
        )
    if config.max_model_len is not None and config.max_model_len > metadata.context:
        raise InvalidConfiguration(
            f"max_model_len {config.max_model_len} is beyond the program's context of {metadata.context}",
            param="max_model_len",
        )
    _check_widths(metadata, config)


def _check_widths(metadata: ProgramMetadata, config: EngineConfig) -> None:
    w, m = metadata.max_prefill_tokens, metadata.min_prefill_tokens
    asked_w = config.max_prefill_tokens
    if asked_w is not None and not m <= asked_w <= w:
        raise InvalidConfiguration(
            f"max_prefill_tokens must lie in the program's [{m}, {w}], not {asked_w}", param="max_prefill_tokens"
        )
    asked_m = config.min_prefill_tokens
    if "min_prefill_tokens" in config.model_fields_set and not m <= asked_m <= (asked_w or w):
        raise InvalidConfiguration(
            f"min_prefill_tokens must lie in [{m}, {asked_w or w}] for this program, not {asked_m}",
            param="min_prefill_tokens",
        )


def check_torch(metadata: ProgramMetadata, version: str) -> None:
    """Raises `InvalidProgram` unless it was compiled by this `version` of torch, without what follows a plus."""
    if metadata.torch != version:
        raise InvalidProgram(
            f"the program was compiled by torch {metadata.torch}, and this is torch {version}: export it again",
            param="model",
        )

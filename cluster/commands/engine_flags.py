"""The command-line flags of an engine, made from `EngineConfig` itself so that the two cannot drift apart."""

from __future__ import annotations

import argparse
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from cluster.commands.argument_types import json_value
from cluster.commands.help_format import flag_of, shown
from cluster.setting_faults import told_fault
from planner.errors import InvalidConfiguration
from worker.config import EngineConfig

HELP = {
    "device": "where the model runs",
    "dtype": "numbers of weights, and of keys and values unless kv-cache-dtype says otherwise",
    "quantization": "numbers of the layers' matrices: int8 or int4 weights, or fp8 products",
    "kv_cache_dtype": "numbers of keys and values on a GPU, the model's unless given; fp8: e4m3 with a scale a head",
    "load_format": "dummy: seeded random weights, from config.json alone",
    "max_model_len": "most tokens of one sequence, prompt and answer",
    "max_cells": "tokens whose keys and values the pool holds",
    "gpu_memory_utilization": "share of a GPU's memory that weights, work and pool may take together",
    "kv_initial_cells": "cells that a GPU's pool begins with, to grow as they are needed; all of them unless given",
    "swap_space": "GiB of host memory for cells of preempted sequences; 4 on a GPU and 0 on a CPU unless given",
    "max_prefill_tokens": "widest prefill forward; 512 on a CPU and 8192 on a GPU unless given",
    "min_prefill_tokens": "narrowest prefill forward",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "most tokens of one step",
    "prefill_chunk_tokens": "most prompt tokens of one sequence before the next has its turn",
    "max_waiting": "requests that may wait",
    "max_waiting_tokens": "tokens of prompts that may wait",
    "tenant_weights": "what tenants get in proportion to each other, as JSON by name; 1 for who is not named",
    "prefix_caching": "keep cells of finished prompts for requests that begin alike",
    "cuda_graph": "capture decode steps and short prefills on a GPU; without, each of their kernels is launched",
    "enable_lora": "take requests for LoRA adapters beside the model",
    "max_loras": "adapters that are loaded at once, each in a slot of its own",
    "max_lora_rank": "highest rank of an adapter",
    "num_threads": "processor threads of the model",
    "seed": "of dummy weights",
}


ADAPTERS = frozenset({"enable_lora", "max_loras", "max_lora_rank"})
"""Of commands that have no adapters."""


def add_engine_flags(parser: argparse.ArgumentParser, *, without: frozenset[str] = frozenset()) -> None:
    """One flag for each setting but `model` and those in `without`. A flag that is not given is absent from the
    namespace's values (None), so that other sources and the setting's own default can have their say."""
    group = parser.add_argument_group("engine")
    for name, setting in EngineConfig.model_fields.items():
        if name != "model" and name not in without:
            group.add_argument(flag_of(name), default=None, help=_help(name, setting), **_argument(setting))


def given_engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags were given for."""
    values = {name: getattr(args, name, None) for name in EngineConfig.model_fields if name != "model"}
    return {name: value for name, value in values.items() if value is not None}


def engine_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    """Raises `InvalidConfiguration` that names the flag at fault."""
    try:
        return EngineConfig(model=model, **settings)
    except ValidationError as fault:
        name = str(fault.errors()[0]["loc"][0])
        raise InvalidConfiguration(told_fault(fault, flag_of(name)), param=name) from fault


def _argument(setting: FieldInfo) -> dict[str, Any]:
    kind = setting.annotation
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Mapping:
        return {"type": json_value, "metavar": "JSON"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": kind, "metavar": "N" if kind is int else "NUMBER"}


def _help(name: str, setting: FieldInfo) -> str:
    default = setting.get_default(call_default_factory=True)
    default = "derived" if default is None else "none" if default == {} else shown(default)
    return f"{HELP[name]} (default: {default})"

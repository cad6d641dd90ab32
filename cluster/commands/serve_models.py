"""The models that `raycomb serve` is told of: named on the command line, or listed in the file of --config."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from cluster.adapters.settings import named_modules
from cluster.checkpoints import is_fetched, name_on_every_node, resolve
from cluster.commands.engine_flags import engine_config, given_engine_settings
from cluster.commands.help_format import flag_of
from cluster.model_settings import ModelSettings
from planner.errors import InvalidConfiguration
from worker.config import EngineConfig

_OF_WORKERS: Final = ("num_workers", "min_workers", "max_workers", "executor")
_OF_ONE: Final = ("served_model_name", "lora_modules", "lora_folder")
"""Flags that cannot mean several models."""

_ENGINE: Final = frozenset(EngineConfig.model_fields)
_MODEL: Final = frozenset(ModelSettings.model_fields) - {"engine"}


def told_models(args: argparse.Namespace) -> list[dict[str, Any]]:
    """For each model the settings of `ModelSettings`. What flags say holds for all that do not say it themselves.

    Raises `SetupError` that names the setting at fault.
    """
    entries = _entries(args)
    if not entries:
        raise InvalidConfiguration(
            "which model? give its name right after `serve`, or `model:` in --config", param="model"
        )
    for name in _OF_ONE:
        if len(entries) > 1 and getattr(args, name):
            raise InvalidConfiguration(
                f"{flag_of(name)} cannot mean {len(entries)} models: say it for each, under `models:` in "
                "the file of --config",
                param=name,
            )
    return [_settings(entry, args, f"models[{place}]") for place, entry in enumerate(entries)]


def _entries(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.models is None:
        return [{"model": model} for model in args.model]
    if args.model:
        raise InvalidConfiguration("models are listed in --config; name none after `serve`", param="models")
    if not isinstance(args.models, list) or not all(isinstance(entry, dict) for entry in args.models):
        raise InvalidConfiguration("models must be a list of one mapping for each model", param="models")
    return [{str(name).replace("-", "_"): value for name, value in entry.items()} for entry in args.models]


def _settings(entry: dict[str, Any], args: argparse.Namespace, where: str) -> dict[str, Any]:
    own = dict(entry)
    names = own.pop("served_model_name", None) or args.served_model_name or ()
    model = own.get("model")
    if not isinstance(model, str):
        raise InvalidConfiguration(f"{where}: which model?", param="model")
    if unknown := sorted(own.keys() - _ENGINE - _MODEL):
        raise InvalidConfiguration(f"{where}: unknown setting {unknown[0]!r}", param=unknown[0])
    engine = {name: own.pop(name) for name in sorted(own.keys() & _ENGINE - {"model"})}
    del own["model"]
    told = {name: value for name in _OF_WORKERS if (value := getattr(args, name)) is not None} | own
    told.setdefault("served_model_names", [names] if isinstance(names, str) else names)
    told["lora_modules"] = named_modules(_modules(told.get("lora_modules", args.lora_modules or ()), where))
    if (folder := told.get("lora_folder", args.lora_folder)) is not None:
        if not isinstance(folder, str):
            raise InvalidConfiguration(f"{where}: lora_folder must be a folder, not {folder!r}", param="lora_folder")
        told["lora_folder"] = str(Path(folder).absolute())
    config = engine_config(model, given_engine_settings(args) | engine)
    if not is_fetched(model):
        resolve(model)  # raises where it is nothing
    return told | {"engine": config.model_copy(update={"model": name_on_every_node(model)})}


def _modules(given: object, where: str) -> list[str]:
    """A mapping from names to folders, or a list, as `name=folder` each."""
    if isinstance(given, dict):
        return [f"{name}={folder}" for name, folder in given.items()]
    if isinstance(given, list | tuple) and all(isinstance(one, str) for one in given):
        return list(given)
    raise InvalidConfiguration(
        f"{where}: lora_modules must map names to folders, or list name=folder; not {given!r}", param="lora_modules"
    )

"""The settings of adapters, read from a command line and checked against each other before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from planner.errors import InvalidConfiguration
from worker.config import EngineConfig
from worker.models.lora_config import read_lora_config


def named_modules(given: Iterable[str]) -> dict[str, str]:
    """`name=folder`, or an object of JSON with `name` and `path`, each; with the folders made absolute, since workers
    run elsewhere.

    Raises `InvalidConfiguration` or `InvalidAdapter` that names what is wrong with one.
    """
    modules: dict[str, str] = {}
    for text in given:
        name, folder = _named(text)
        if name in modules:
            raise InvalidConfiguration(f"--lora-modules names {name!r} twice", param="lora_modules")
        read_lora_config(Path(folder))
        modules[name] = str(Path(folder).absolute())
    return modules


def _named(text: str) -> tuple[str, str]:
    name, _, folder = text.partition("=")
    if text.lstrip().startswith("{"):
        try:
            told = json.loads(text)
        except ValueError as error:
            raise InvalidConfiguration(
                f"--lora-modules has {text!r}, which is not JSON", param="lora_modules"
            ) from error
        if unknown := sorted(told.keys() - {"name", "path"}):
            raise InvalidConfiguration(f"--lora-modules has {unknown[0]!r}, which is not known", param="lora_modules")
        name, folder = told.get("name"), told.get("path")
    if not (isinstance(name, str) and isinstance(folder, str) and name and folder):
        raise InvalidConfiguration(f"--lora-modules takes name=folder, not {text!r}", param="lora_modules")
    return name, folder


def check_lora_settings(
    engine: EngineConfig, modules: Mapping[str, str], folder: str | None, names: Iterable[str], *, has_admin: bool
) -> None:
    """Raises `InvalidConfiguration` where they contradict each other. `names`: what clients call the model."""
    for param, is_given in (("lora_modules", bool(modules)), ("lora_folder", folder is not None)):
        if is_given and not engine.enable_lora:
            raise InvalidConfiguration(f"{param} is given and enable_lora is not", param=param)
    if folder is not None and not has_admin:
        raise InvalidConfiguration(
            "lora_folder lets adapters be loaded at run time, which needs an admin's key: admin_keys is empty",
            param="lora_folder",
        )
    if len(modules) > engine.max_loras:
        raise InvalidConfiguration(
            f"lora_modules names {len(modules)} adapters, and max_loras is {engine.max_loras}", param="lora_modules"
        )
    if taken := sorted(set(modules) & set(names)):
        raise InvalidConfiguration(f"lora_modules calls an adapter {taken[0]!r}, as the model", param="lora_modules")

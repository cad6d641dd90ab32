"""Settings from a YAML file and from the environment, put before the flags of the command line.

They become flags themselves, so one parser checks them all, and a later flag replaces an earlier one: flag beats
environment, environment beats YAML, YAML beats default.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.commands.argument_types import json_value
from cluster.commands.help_format import flag_of
from cluster.commands.other_flags import advice
from planner.errors import InvalidConfiguration

ENVIRONMENT_PREFIX = "RAYCOMB_"


def merged_tokens(
    parser: argparse.ArgumentParser, tokens: Sequence[str], environment: Mapping[str, str] = os.environ
) -> list[str]:
    """`tokens` with what the environment and `--config` say put before them. `parser` is the command's own.

    Raises `InvalidConfiguration` that names an unknown key of the file, or a variable of Kubernetes. Other
    variables that are no setting are others'.
    """
    settings = {name: action for action in parser._actions for name in _names(action)}
    config_path, _ = _config_parser().parse_known_args(list(tokens))
    from_file = _read(Path(config_path.config)) if config_path.config else {}
    unknown = sorted(name for name in from_file if name not in settings)
    if unknown:
        better = advice([f"--{unknown[0]}"], parser._option_string_actions)
        told = f"{config_path.config}: unknown setting {unknown[0]!r}"
        raise InvalidConfiguration(told if better is None else f"{told}; {better}", param=unknown[0])
    given, _ = parser.parse_known_args(list(tokens))
    merged: list[str] = []
    from_environment = _from_environment(settings, environment)
    for name, value in (from_file | from_environment).items():
        if value is None:  # YAML's null: as if the line were not there
            continue
        if not settings[name].option_strings:
            merged += [] if getattr(given, name) else [str(item) for item in _listed(value)]
        elif not (_repeats(settings[name]) and getattr(given, name)):  # a list is replaced as a whole
            flags = _as_flags(settings[name], name, value)
            where = _variable(name) if name in from_environment else f"{config_path.config}: {name}"
            _check_values(parser, settings[name], flags, where)
            merged += flags
    return [*merged, *tokens]


def _names(action: argparse.Action) -> list[str]:
    return [] if action.dest in ("help", "config") else [action.dest]


def _config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    return parser


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}", param="config") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfiguration(f"{path} is not YAML: {' '.join(str(error).split())}", param="config") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfiguration(f"{path} must hold settings by name", param="config")
    return {str(name).replace("-", "_"): value for name, value in content.items()}


def _from_environment(settings: Mapping[str, argparse.Action], environment: Mapping[str, str]) -> dict[str, Any]:
    found = {name: environment.get(_variable(name)) for name in settings}
    told = {name: value for name, value in found.items() if value is not None}
    if told.get("port", "").startswith("tcp://"):
        raise InvalidConfiguration(
            f"RAYCOMB_PORT is {told['port']}, which Kubernetes sets where a Service is named raycomb: give that "
            "Service another name, or the pod `enableServiceLinks: false`",
            param="port",
        )
    return told


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _check_values(parser: argparse.ArgumentParser, action: argparse.Action, flags: list[str], where: str) -> None:
    """Raises `InvalidConfiguration` that says `where` a value stands that the flag would not take."""
    for value in (value for flag in flags for value in flag.partition("=")[2:] if value):
        try:
            parser._check_value(action, parser._get_value(action, value))
        except argparse.ArgumentError as error:
            raise InvalidConfiguration(f"{where}: {error.message}", param=action.dest) from error


def _as_flags(action: argparse.Action, name: str, value: Any) -> list[str]:
    flag = flag_of(name)
    if isinstance(action, argparse.BooleanOptionalAction):
        truth = str(value).lower()
        if truth not in ("true", "false", "1", "0"):
            raise InvalidConfiguration(f"{name} must be true or false, not {value!r}", param=name)
        return [flag if truth in ("true", "1") else flag_of(f"no_{name}")]
    if isinstance(value, dict | list) and action.type is json_value:
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, dict) and isinstance(action, argparse._ExtendAction):
        return [f"{flag}={key}={item}" for key, item in value.items()]
    if isinstance(value, dict) or (isinstance(value, list) and not _repeats(action)):
        raise InvalidConfiguration(f"{name} takes one value, not {value!r}", param=name)
    return [f"{flag}={item}" for item in _listed(value)]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _repeats(action: argparse.Action) -> bool:
    """Whether each further flag adds to the setting instead of replacing it."""
    return isinstance(action, argparse._AppendAction | argparse._ExtendAction)

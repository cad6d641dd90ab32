"""How `--help` shows a flag: a word for its value that says its kind, and its default. Not for what a flag means."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

KINDS: Final = {int: "N", float: "NUMBER", Path: "FILE"}
"""What a value is called where the flag itself does not say."""


class HelpFormatter(argparse.HelpFormatter):
    """Of all commands, so that none has to say twice what its flags already know."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return value_name(action)

    def _get_help_string(self, action: argparse.Action) -> str:
        return meaning(action).replace("%", "%%")  # it is formatted once more


def flag_of(setting: str) -> str:
    """The flag that sets it."""
    return f"--{setting.replace('_', '-')}"


def value_name(action: argparse.Action) -> str:
    """The word for the value of a flag that has none of its own."""
    return next((name for kind, name in KINDS.items() if action.type is kind), "VALUE")


def meaning(action: argparse.Action) -> str:
    """The flag's help, with its default where the help does not say it."""
    text = (action.help or "").replace(" (default: %(default)s)", "").replace("%%", "%")
    parts = [text] if text else []
    if action.required and action.option_strings:
        parts.append("(required)")
    elif "(default:" not in text and has_default(action):
        parts.append(f"(default: {shown(action.default)})")
    return " ".join(parts)


def shown(default: object) -> str:
    """A default as one would write it."""
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(getattr(default, "value", default))


def has_default(action: argparse.Action) -> bool:
    """Whether leaving the flag out means one value that can be told. A list that is empty and a switch that is off
    are nothing to tell."""
    default = action.default
    return default is not None and default is not False and default not in ([], argparse.SUPPRESS)

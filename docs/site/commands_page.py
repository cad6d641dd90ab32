"""The page of the commands, out of their parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cluster.cli import COMMANDS, make_parser
from cluster.commands.help_format import meaning, value_name
from docs.site.tables import cell, table

HEAD = """# Commands

<!-- Written by `python -m docs.site.write`, out of the parsers; not to be changed by hand. -->

`raycomb COMMAND --help` says the same, and `raycomb --version` which one it is. Settings of `raycomb serve` may also
come from `--config FILE` (YAML with the names of the flags, with `_` or `-`) and from variables (`RAYCOMB_MAX_CELLS`
for `--max-cells`): a flag beats a variable, which beats the file, which beats the default. Exit code 2 and one line on
stderr mean that what was asked for cannot be.
"""


def commands_page() -> str:
    """Markdown with a section for each command."""
    sections = [HEAD]
    for name, (_, summary) in COMMANDS.items():
        sections += _sections(f"raycomb {name}", summary, _subparsers(make_parser([name]))[name])
    return "\n".join(sections)


def _sections(name: str, summary: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """That of the command itself, and of its own commands if it has any."""
    subcommands = _subparsers(parser)
    words = [_name(action) for action in parser._actions if not action.option_strings and not _is_commands(action)]
    yield f"## `{' '.join([name, *words])}`\n\n{summary[0].upper()}{summary[1:]}.\n"
    if not subcommands:
        rows = [[f"`{_spelling(action)}`", cell(meaning(action))] for action in _told(parser)]
        yield table(["argument", "what it is"], rows)
    summaries = {choice.dest: choice.help or "" for action in parser._actions for choice in _choices_of(action)}
    for word, subparser in subcommands.items():
        yield from _sections(f"{name} {word}", summaries[word], subparser)


def _told(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return _name(action)
    value = "" if action.nargs == 0 else f" {_value(action)}"
    return ", ".join(action.option_strings) + value


def _name(action: argparse.Action) -> str:
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    return f"[{name}]" if action.nargs == "?" else name


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, tuple):
        return " ".join(action.metavar)
    if action.metavar is not None:
        name = f"{{{action.metavar.replace('|', ',')}}}" if "|" in action.metavar else action.metavar
        return f"{name} ..." if action.nargs == "+" else name
    if action.choices is not None:
        return f"{{{','.join(str(getattr(choice, 'value', choice)) for choice in action.choices)}}}"
    return value_name(action)


def _is_commands(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return {
        name: subparser
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, subparser in action.choices.items()
    }


def _choices_of(action: argparse.Action) -> list[argparse.Action]:
    return list(action._choices_actions) if isinstance(action, argparse._SubParsersAction) else []

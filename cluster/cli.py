"""The `raycomb` command: `serve` a model, `run` prompts offline, `bench` either, `export` it, `explain` steps, ask the
`doctor`, and more.

Each subcommand is a module with `add_arguments(parser)` and `execute(args) -> exit code`. Exit code 2 and one line on
stderr mean that something was asked for that cannot be. Importing this module costs nothing, so that Ctrl-C is heard
from the first moment on.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from cluster.commands.apart import run_apart
from cluster.commands.help_format import HelpFormatter

COMMANDS = {
    "serve": ("cluster.commands.serve", "serve a model over HTTP, on many workers"),
    "run": ("cluster.commands.run", "run prompts from a file through an engine in this process"),
    "bench": ("cluster.commands.bench", "measure an engine or a server"),
    "export": ("cluster.commands.export", "make a program of a model: compiled once, started anywhere alike"),
    "inspect": ("cluster.commands.inspect", "say what is in a program"),
    "top": ("cluster.commands.top", "watch the fleet of a running service"),
    "explain": ("cluster.commands.explain", "say why the steps of a recorded step log were as they were"),
    "keys": ("cluster.commands.keys", "make an API key and its entry for a file of keys"),
    "certs": ("cluster.commands.certs", "make the certificates of data plane and front"),
    "doctor": ("cluster.commands.doctor", "check this machine, or every node of RAY_ADDRESS's cluster"),
}
EXIT_CODE_OF_SETUP_ERRORS = 2
EXIT_CODE_OF_CTRL_C = 130
EXIT_CODE_OF_BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where to read more, instead of printing every flag."""

    def __init__(self, **given: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **given)

    def error(self, message: str) -> NoReturn:
        self.complain(self.prog, message)

    def complain(self, prog: str, message: str) -> NoReturn:
        self.exit(EXIT_CODE_OF_SETUP_ERRORS, f"{prog}: error: {message} ({prog} --help tells more)\n")


class ShowVersion(argparse.Action):
    """Prints the version, which it only now looks up, and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **given: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **given)

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        from cluster.version import version_line

        print(version_line())
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process, if None); gives the exit code."""
    try:
        if argv is None and sys.argv[1:2] == ["serve"] and (ended := run_apart()) is not None:
            return ended
        code = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return EXIT_CODE_OF_CTRL_C
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the interpreter's end finds no fault
        return EXIT_CODE_OF_BROKEN_PIPE
    return code


def _reader_left() -> bool:
    """Whether nobody reads our output any more, such as `head` that has read enough."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(0))


def _run(tokens: list[str]) -> int:
    from cluster.commands.settings_sources import merged_tokens
    from planner.errors import RaycombError

    try:
        parser = make_parser(tokens)
        if not tokens:
            parser.print_help()
            return EXIT_CODE_OF_SETUP_ERRORS
        _check_command(parser, tokens[0])
        if tokens[:1] == ["serve"] and not {"-h", "--help"} & set(tokens):
            tokens = ["serve", *merged_tokens(serve_parser(), tokens[1:])]
        args, unknown = parser.parse_known_args(tokens)
        if unknown:
            parser.complain(f"raycomb {args.command}", _told_of(unknown, args.command))
        code: int = args.execute(args)
    except RaycombError as error:
        print(f"raycomb: error: {error.message}", file=sys.stderr)
        return EXIT_CODE_OF_SETUP_ERRORS
    return code


def _check_command(parser: Parser, word: str) -> None:
    """Ends with a sentence where `word` is neither a command nor a flag."""
    if word.startswith("-") or word in COMMANDS:
        return
    close = get_close_matches(word, COMMANDS, n=1)
    better = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}"
    parser.error(f"there is no command {word!r}; {better}")


def _told_of(unknown: Sequence[str], command: str) -> str:
    """What is wrong with these words, and what to say instead."""
    from cluster.commands.other_flags import advice

    told = f"unrecognised arguments: {' '.join(unknown)}"
    better = advice(unknown, serve_parser()._option_string_actions) if command == "serve" else None
    return told if better is None else f"{told}; {better}"


def make_parser(tokens: Sequence[str]) -> Parser:
    """The parser of all commands; only the one that `tokens` ask for is imported."""
    parser = Parser(prog="raycomb", description="Batched language-model serving on many GPUs.")
    parser.add_argument("--version", action=ShowVersion, help="of Raycomb and of what is beneath it, and end")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in tokens[:1]:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(execute=module.execute)
    return parser


def serve_parser() -> argparse.ArgumentParser:
    """The parser of `raycomb serve` alone, with all its settings."""
    from cluster.commands.serve import add_arguments

    parser = Parser(prog="raycomb serve", allow_abbrev=False)
    add_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())

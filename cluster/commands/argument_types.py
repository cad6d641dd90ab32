"""What commands take for a port, a number, a file or a service, for argparse: each raises `ArgumentTypeError` in one
sentence."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TypeVar

from cluster.bench.sse_client import Target
from planner.errors import InvalidConfiguration

E = TypeVar("E", bound=Enum)


def port_number(text: str) -> int:
    """A port that can be listened on."""
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:6]) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text} is not a port: ports are 1 to 65535")
    return int(text)


def seconds(text: str) -> float:
    """How long something may take, or is waited for: 0 or more."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return number


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas between them."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and int(part[:20]) for part in parts):
        raise argparse.ArgumentTypeError(
            f"whole numbers of at least 1 are wanted, with commas between them, not {text}"
        )
    return tuple(int(part) for part in parts)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not (text.isascii() and text.isdecimal() and int(text[:20])):
        raise argparse.ArgumentTypeError(f"a whole number of at least 1 is wanted, not {text}")
    return int(text)


def member_of(kind: type[E]) -> Callable[[str], E]:
    """What reads a member of `kind` by its value."""

    def read(text: str) -> E:
        try:
            return kind(text)
        except ValueError as error:
            known = ", ".join(str(member.value) for member in kind)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {known}") from error

    return read


def file_to_read(text: str) -> Path:
    """One that is there."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path


def file_to_write(text: str) -> Path:
    """What is written at the end of a long run is wanted to have a place before it begins."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def service_url(text: str) -> str:
    """Where a service is, without a slash at the end, and without the /v1 that clients of OpenAI's API have there."""
    try:
        Target.parse(text)
    except (InvalidConfiguration, ValueError) as error:  # the second: a port that is none
        raise argparse.ArgumentTypeError(f"a service's URL looks like http://host:port, not {text!r}") from error
    return text.rstrip("/").removesuffix("/v1")

"""What commands take for a port, a number, a file or a service, for argparse: each raises `ArgumentTypeError` in one
sentence. Also which flags mean something together."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from cluster.bench.sse_client import Target
from cluster.commands.help_format import flag_of
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


def positive_number(text: str) -> float:
    """More than 0; may be inf."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"a number above 0 is wanted, not {text}")
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


def one_of(kind: type[Enum]) -> dict[str, Any]:
    """For `add_argument`: a member of `kind` by its value, and how its values are shown."""
    return {"type": member_of(kind), "metavar": "|".join(str(member.value) for member in kind)}


def refuse_unread(args: argparse.Namespace, readers: Mapping[str, Collection[Enum]]) -> None:
    """Raises `InvalidConfiguration` for a flag that was given and that the load of --workload does not read. `readers`:
    by flag, the loads that do. A flag that was not given is None."""
    for name, loads in readers.items():
        if getattr(args, name) is not None and args.workload not in loads:
            raise InvalidConfiguration(f"{flag_of(name)} means nothing to --workload {args.workload.value}", param=name)


def json_value(text: str) -> Any:
    """Any value of JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error


def host_and_port(text: str) -> str:
    """Where a server of gRPC is, as it was written."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"a server's place looks like host:port, not {text!r}")
    return text


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

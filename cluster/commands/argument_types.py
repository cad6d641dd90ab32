"""What commands take for a port, a time or a service, for argparse: each raises `ArgumentTypeError` in one sentence."""

from __future__ import annotations

import argparse
import math

from cluster.bench.sse_client import Target
from planner.errors import InvalidConfiguration


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


def service_url(text: str) -> str:
    """Where a service is, without a slash at the end."""
    try:
        Target.parse(text)
    except (InvalidConfiguration, ValueError) as error:  # the second: a port that is none
        raise argparse.ArgumentTypeError(f"a service's URL looks like http://host:port, not {text!r}") from error
    return text.rstrip("/")

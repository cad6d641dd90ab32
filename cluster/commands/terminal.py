"""Lines for the person at the terminal: a service has its output for them, a command only its standard error."""

from __future__ import annotations

import sys


def report(line: str) -> None:
    """Progress of a service."""
    print(f"raycomb: {line}", flush=True)


def say(line: str) -> None:
    """Progress of a command, on standard error."""
    print(line, file=sys.stderr, flush=True)

"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are Markdown of one line each; see `cell`."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def cell(text: str) -> str:
    """Any text as one that a cell can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")

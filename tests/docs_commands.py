"""The commands that the documentation shows: those of its shell blocks, and those between backticks in its text."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
GENERATED = {ROOT / "docs" / "commands.md", ROOT / "docs" / "api.md", ROOT / "docs" / "grpc.md"}
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "deploy/README.md", ROOT / "benchmarks/README.md"} - GENERATED
)
PROGRAMS = ("raycomb", "make", "python", "pytest")
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
_INLINE = re.compile(rf"`((?:{'|'.join(PROGRAMS)}) [^`\n]+)`")
_ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")


@dataclass(frozen=True, slots=True)
class Command:
    """`words`: without variables before and redirections behind. `inline`: a mention, which may leave things out."""

    page: str
    text: str
    words: tuple[str, ...]
    inline: bool = field(default=False)

    @property
    def program(self) -> str:
        return self.words[0]

    def __str__(self) -> str:
        return f"{self.page}: {self.text[:60]}"


def commands() -> list[Command]:
    """All of them, those inside an alias included, in the order of the pages."""
    found = []
    for path in PAGES:
        page, text = path.relative_to(ROOT).as_posix(), path.read_text()
        for block in _BLOCK.findall(text):
            found += block_commands(page, block)
        for mention in _INLINE.findall(_BLOCK.sub("", text)):
            found.append(_command(page, mention.replace("\\|", "|"), inline=True))
    return found


def block_commands(page: str, block: str) -> list[Command]:
    """Those of one block."""
    aliases: dict[str, str] = {}
    found = []
    for text in _joined(block):
        if text.startswith("alias "):
            name, _, meaning = shlex.split(text)[1].partition("=")
            aliases[name] = meaning
            continue
        command = _command(page, text)
        if command.program in aliases:
            (inner,) = command.words[1:]
            outer = _command(page, f"{aliases[command.program]} {shlex.quote(inner)}")
            found += [outer, _command(page, inner.replace("raycomb/deploy/", "deploy/"))]
        else:
            found.append(command)
    return found


def _joined(block: str) -> list[str]:
    """Commands of a block: a line goes on behind a backslash and inside quotes."""
    found, text = [], ""
    for line in block.splitlines():
        text += line
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        try:
            shlex.split(text, comments=True)
        except ValueError:  # a quote is open
            text += "\n"
            continue
        if text.strip():
            found.append(text)
        text = ""
    assert not text, text
    return found


def _command(page: str, text: str, *, inline: bool = False) -> Command:
    words = shlex.split(text, comments=True)
    while _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if ">" in words:
        words = words[: words.index(">")]
    return Command(page, text, tuple(words), inline)

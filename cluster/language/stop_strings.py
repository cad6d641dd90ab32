"""Finds stop strings in a text that arrives in pieces, and hides them.

Text that may still become a stop string is held back; everything else passes at once. The cut is where the first
match begins. What comes out does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scan:
    """`text` may be shown. `stopped`: a stop string begins right after it, or ends it where it is kept, and the text is
    over."""

    text: str
    stopped: bool


class StopStrings:
    """Watches one text. Owner: the choice it belongs to."""

    def __init__(self, strings: Sequence[str], *, kept: bool = False) -> None:
        """`kept`: the stop string that ends the text is shown."""
        assert all(strings), "a stop string is not empty"
        self._strings = tuple(strings)
        self._kept = kept
        self._held = ""

    def push(self, piece: str) -> Scan:
        """Take more text. Must not be called after a stop.

        Of several matches the one that begins first wins, and a match is only final when no other stop string that
        begins before it is still open: "abcd" and "bc" on "abc" wait for the next character.
        """
        text = self._held + piece
        found = self._matches(text)
        open_at = self._open_at(text)
        if found and min(found)[0] <= open_at:
            self._held = ""
            return Scan(self._cut(text, found), stopped=True)
        self._held = text[open_at:]
        return Scan(text[:open_at], stopped=False)

    def finish(self) -> Scan:
        """No more text comes: what was held back is shown, up to a match that had waited."""
        text, self._held = self._held, ""
        found = self._matches(text)
        return Scan(self._cut(text, found), stopped=True) if found else Scan(text, stopped=False)

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Where each stop string that is in the text first begins, and ends."""
        return [(place, place + len(one)) for one in self._strings if (place := text.find(one)) >= 0]

    def _cut(self, text: str, found: list[tuple[int, int]]) -> str:
        begin, end = min(found)
        return text[: end if self._kept else begin]

    def _open_at(self, text: str) -> int:
        """Where the earliest suffix begins that is a proper prefix of a stop string; the text's end if none."""
        longest = max(map(len, self._strings), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            tail = text[start:]
            if any(len(tail) < len(string) and string.startswith(tail) for string in self._strings):
                return start
        return len(text)

"""Finds where a JSON object or list ends in a text that comes in pieces. It does not check that it is JSON."""

from __future__ import annotations


class JsonEnd:
    """Feed it from the opening bracket on. Owner: one reader."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """How many characters of `text` belong to the value, once its last one has come; None before."""
        for place, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None

"""Tells a model's thoughts, `<think>...</think>` before its answer, from the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from cluster.language.message_parts import Content, Part, Reasoning

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class ReasoningReader:
    """Owner: one choice's text. `begun`: the prompt has opened the thoughts already."""

    def __init__(self, *, begun: bool) -> None:
        self._buffer = ""
        self._thinking: bool | None = True if begun else None  # None: not known yet
        self._fresh = False  # the line ends between thoughts and answer are still to come

    def push(self, text: str) -> list[Part]:
        """What is known with this text."""
        self._buffer += text
        if self._thinking is None:
            start = self._buffer.lstrip()
            if start.startswith(OPENING):
                self._buffer, self._thinking = start.removeprefix(OPENING), True
            elif not OPENING.startswith(start):
                self._thinking = False
        return [] if self._thinking is None else list(self._read())

    def finish(self) -> list[Part]:
        """What is left when the text has ended."""
        text, self._buffer = self._buffer, ""
        if not text:
            return []
        return [Reasoning(text) if self._thinking else Content(text)]

    def _read(self) -> Iterator[Part]:
        if self._thinking:
            text, found, rest = self._buffer.partition(CLOSING)
            if found:
                self._buffer, self._thinking, self._fresh = rest, False, True
            else:
                kept = next((n for n in range(len(CLOSING) - 1, 0, -1) if text.endswith(CLOSING[:n])), 0)
                text, self._buffer = text[: len(text) - kept], text[len(text) - kept :]
            if text:
                yield Reasoning(text)
            if not found:
                return
        text, self._buffer = self._buffer, ""
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        if text:
            yield Content(text)

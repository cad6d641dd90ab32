"""Reads an assistant's message out of the text of a choice: thoughts first, then content and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from cluster.language.message_parts import Content, Part
from cluster.language.reasoning import ReasoningReader
from cluster.language.tool_reader import ToolReader


class MessageReader:
    """Owner: one choice. Without a reader of its kind thoughts, or calls, are content like the rest."""

    def __init__(self, reasoning: ReasoningReader | None = None, tools: ToolReader | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return 0 if self._tools is None else self._tools.num_calls

    def push(self, text: str) -> list[Part]:
        """What is known with this text."""
        return list(self._sorted([Content(text)] if self._reasoning is None else self._reasoning.push(text)))

    def finish(self) -> list[Part]:
        """What is left when the text has ended."""
        parts = [] if self._reasoning is None else list(self._sorted(self._reasoning.finish()))
        return parts + ([] if self._tools is None else self._tools.finish())

    def _sorted(self, parts: Iterable[Part]) -> Iterator[Part]:
        for part in parts:
            if isinstance(part, Content) and self._tools is not None:
                yield from self._tools.push(part.text)
            elif not isinstance(part, Content) or part.text:
                yield part


NewReader = Callable[[], MessageReader]
"""A reader for each choice of an answer."""

"""The items of a response's output while they grow, one after the other, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cluster.language.message_parts import CallArguments, CallBegun, Content, Part, Reasoning
from protos.openai_response_answers import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    Status,
)


class Event(NamedTuple):
    """`fields` are plain JSON; the sequence number is put to them where they are written."""

    type: str
    fields: dict[str, Any]


class _Growing:
    """One item. `kind`: what its texts' events are called. Owner: the items."""

    def __init__(self, index: int, kind: str, prefix: str, call: CallBegun | None = None) -> None:
        self.index = index
        self.kind = kind
        self.call = call
        self.text = ""
        self.id = f"{prefix}_{uuid.uuid4().hex}"

    def item(self, status: Status, *, empty: bool = False) -> OutputItem:
        """As it stands; `empty`: as it is told when it begins."""
        text = "" if empty else self.text
        if self.call is not None:
            return OutputCall(id=self.id, status=status, call_id=self.call.id, name=self.call.name, arguments=text)
        if self.kind == "reasoning_text":
            content = [] if empty else [ReasoningText(text=text)]
            return OutputReasoning(id=self.id, status=status, content=content)
        return OutputMessage(id=self.id, status=status, content=[] if empty else [OutputText(text=text)])

    def begin(self) -> Iterator[Event]:
        begun = dump(self.item("in_progress", empty=True))
        yield Event("response.output_item.added", {"output_index": self.index, "item": begun})
        if self.call is None:
            yield Event("response.content_part.added", self._of() | {"content_index": 0, "part": self._part("")})

    def push(self, text: str) -> Iterator[Event]:
        self.text += text
        yield Event(f"response.{self.kind}.delta", self._of() | self._place() | {"delta": text})

    def end(self, status: Status) -> Iterator[Event]:
        done = {"arguments": self.text} if self.call is not None else {"text": self.text}
        yield Event(f"response.{self.kind}.done", self._of() | self._place() | done)
        if self.call is None:
            yield Event("response.content_part.done", self._of() | {"content_index": 0, "part": self._part(self.text)})
        yield Event("response.output_item.done", {"output_index": self.index, "item": dump(self.item(status))})

    def _of(self) -> dict[str, Any]:
        return {"item_id": self.id, "output_index": self.index}

    def _place(self) -> dict[str, Any]:
        if self.call is not None:
            return {}
        return {"content_index": 0} | ({"logprobs": []} if self.kind == "output_text" else {})

    def _part(self, text: str) -> dict[str, Any]:
        return dump(ReasoningText(text=text) if self.kind == "reasoning_text" else OutputText(text=text))


class ResponseItems:
    """Owner: one response. Parts come in the order in which the model wrote them; an item ends where another begins."""

    def __init__(self) -> None:
        self.done: list[OutputItem] = []
        self._open: _Growing | None = None

    def push(self, parts: Iterable[Part]) -> Iterator[Event]:
        """What is to be told of these parts."""
        for part in parts:
            match part:
                case Content(text):
                    yield from self._in("output_text", "msg")
                    yield from self._grow(text)
                case Reasoning(text):
                    yield from self._in("reasoning_text", "rs")
                    yield from self._grow(text)
                case CallBegun():
                    yield from self._begin(_Growing(self._next, "function_call_arguments", "fc", part))
                case CallArguments(_, text):
                    yield from self._grow(text)

    def finish(self, status: Status) -> Iterator[Event]:
        """End the last item, with this status."""
        growing, self._open = self._open, None
        if growing is not None:
            yield from growing.end(status)
            self.done.append(growing.item(status))

    @property
    def _next(self) -> int:
        return len(self.done) + (self._open is not None)

    def _in(self, kind: str, prefix: str) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(_Growing(self._next, kind, prefix))

    def _begin(self, growing: _Growing) -> Iterator[Event]:
        yield from self.finish("completed")
        self._open = growing
        yield from growing.begin()

    def _grow(self, text: str) -> Iterator[Event]:
        assert self._open is not None, "a text belongs to an item"
        if text:
            yield from self._open.push(text)


def dump(value: Any) -> dict[str, Any]:
    """A wire value as plain JSON."""
    made: dict[str, Any] = value.model_dump(mode="json")
    return made

"""The parts of an assistant's message in OpenAI's words: as one message, or as deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.message_parts import CallArguments, CallBegun, Content, Part, Reasoning
from protos import openai_answers as wire


def message_of(parts: Sequence[Part]) -> wire.ChatMessage:
    """All parts of one message."""
    text = "".join(part.text for part in parts if isinstance(part, Content))
    calls = [part for part in parts if isinstance(part, CallBegun)]
    message = wire.ChatMessage(role="assistant", content=text if text or not calls else None, refusal=None)
    changes: dict[str, object] = {}
    if thoughts := "".join(part.text for part in parts if isinstance(part, Reasoning)):
        changes["reasoning_content"] = thoughts
    if calls:
        changes["tool_calls"] = [
            wire.ToolCall(id=call.id, type="function", function=_called(call, parts)) for call in calls
        ]
    return message.model_copy(update=changes)


def delta_of(parts: Sequence[Part], *, opens: bool) -> wire.ChatDelta:
    """What these parts add to a message; its first delta carries the role, and a text even if it is empty."""
    text = "".join(part.text for part in parts if isinstance(part, Content))
    delta = wire.ChatDelta(role="assistant", content=text) if opens else wire.ChatDelta()
    changes: dict[str, object] = {"content": text} if text else {}
    if thoughts := "".join(part.text for part in parts if isinstance(part, Reasoning)):
        changes["reasoning_content"] = thoughts
    if calls := _call_deltas(parts):
        changes["tool_calls"] = calls
    return delta.model_copy(update=changes)


def _called(call: CallBegun, parts: Sequence[Part]) -> wire.CalledFunction:
    arguments = (part.text for part in parts if isinstance(part, CallArguments) and part.index == call.index)
    return wire.CalledFunction(name=call.name, arguments="".join(arguments))


def _call_deltas(parts: Sequence[Part]) -> list[wire.ToolCallDelta]:
    """One for each call that has news."""
    begun = {part.index: part for part in parts if isinstance(part, CallBegun)}
    arguments: dict[int, str] = dict.fromkeys(begun, "")
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.index] = arguments.get(part.index, "") + part.text
    deltas = []
    for index, text in arguments.items():
        if (call := begun.get(index)) is None:
            deltas.append(wire.ToolCallDelta(index=index, function=wire.FunctionDelta(arguments=text)))
        else:
            function = wire.FunctionDelta(name=call.name, arguments=text)
            deltas.append(wire.ToolCallDelta(index=index, id=call.id, type="function", function=function))
    return deltas

"""The parts of an assistant's message in OpenAI's words: as one message, or as deltas of a stream."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.language.message_parts import CallNews, Content, Part, Reasoning, call_news, text_of
from protos import openai_answers as wire


def message_of(parts: Sequence[Part]) -> wire.ChatMessage:
    """All parts of one message."""
    text, calls = text_of(parts, Content), call_news(parts)
    message = wire.ChatMessage(role="assistant", content=text if text or not calls else None, refusal=None)
    changes: dict[str, object] = {}
    if thoughts := text_of(parts, Reasoning):
        changes["reasoning_content"] = thoughts
    if calls:
        changes["tool_calls"] = [_call(news) for news in calls]
    return message.model_copy(update=changes)


def delta_of(parts: Sequence[Part], *, opens: bool) -> wire.ChatDelta:
    """What these parts add to a message; its first delta carries the role, and a text even if it is empty."""
    text = text_of(parts, Content)
    delta = wire.ChatDelta(role="assistant", content=text) if opens else wire.ChatDelta()
    changes: dict[str, object] = {"content": text} if text else {}
    if thoughts := text_of(parts, Reasoning):
        changes["reasoning_content"] = thoughts
    if calls := call_news(parts):
        changes["tool_calls"] = [_call_delta(news) for news in calls]
    return delta.model_copy(update=changes)


def _call(news: CallNews) -> wire.ToolCall:
    assert news.begun is not None, "all parts of the message are there"
    function = wire.CalledFunction(name=news.begun.name, arguments=news.arguments)
    return wire.ToolCall(id=news.begun.id, type="function", function=function)


def _call_delta(news: CallNews) -> wire.ToolCallDelta:
    if news.begun is None:
        return wire.ToolCallDelta(index=news.index, function=wire.FunctionDelta(arguments=news.arguments))
    function = wire.FunctionDelta(name=news.begun.name, arguments=news.arguments)
    return wire.ToolCallDelta(index=news.index, id=news.begun.id, type="function", function=function)

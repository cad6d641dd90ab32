"""A body of /v1/responses as the conversation that it means, so that it takes the road of every chat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from cluster.web.bodies import validate
from planner.errors import InvalidRequest
from protos.openai import ChatBody
from protos.openai_responses import (
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    ResponsesBody,
    SchemaText,
    TextPart,
)

_SAME: Final = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "seed", "top_k", "min_p", "priority"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "chat_template_kwargs"),
)
_PARAM_OF: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
"""Names of a chat's fields, and what they are called here."""


def chat_of(body: ResponsesBody) -> ChatBody:
    """Raises `InvalidRequest` where no conversation can be made of it."""
    asked: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    asked["messages"] = _messages(body)
    asked["max_completion_tokens"] = body.max_output_tokens
    asked["tools"] = [_tool(tool) for tool in body.tools]
    if body.tools:
        asked["tool_choice"] = _choice(body)
    elif body.tool_choice not in ("none", "auto"):
        raise InvalidRequest("tool_choice needs tools to choose from", param="tool_choice")
    if (asked_form := _form(body)) is not None:
        asked["response_format"] = asked_form
    with own_names():
        return validate(ChatBody, asked)


@contextmanager
def own_names() -> Iterator[None]:
    """Around what speaks of a chat's fields: its refusals then name those of /v1/responses."""
    try:
        yield
    except InvalidRequest as refusal:
        refusal.param = _PARAM_OF.get(refusal.param or "", refusal.param)
        raise


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.instructions is not None:
        made.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*made, {"role": "user", "content": body.input}]
    thoughts = ""  # they open the turn that follows
    for item in body.input:
        _add(item, made, thoughts)
        thoughts = ""
        if not isinstance(item, InputMessage | InputCall | InputCallOutput):
            thoughts = "".join(thought.text for thought in item.content)
    return made


def _add(item: InputItem, made: list[dict[str, Any]], thoughts: str) -> None:
    """Calls belong to the assistant's turn that they follow."""
    if isinstance(item, InputCallOutput):
        made.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
    elif isinstance(item, InputMessage):
        made.append({"role": item.role, "content": _text(item.content)})
        if thoughts and item.role == "assistant":
            made[-1]["reasoning_content"] = thoughts
    elif isinstance(item, InputCall):
        if not made or made[-1]["role"] != "assistant" or thoughts:
            made.append({"role": "assistant"} | ({"reasoning_content": thoughts} if thoughts else {}))
        function = {"name": item.name, "arguments": item.arguments}
        made[-1].setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _text(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(body: ResponsesBody) -> str | dict[str, Any]:
    if isinstance(body.tool_choice, str):
        return body.tool_choice
    return {"type": "function", "function": {"name": body.tool_choice.name}}


def _form(body: ResponsesBody) -> dict[str, Any] | None:
    asked = body.text.format
    if isinstance(asked, SchemaText):
        named = {"name": asked.name, "schema": asked.json_schema, "strict": asked.strict}
        return {"type": "json_schema", "json_schema": named}
    return None if asked.type == "text" else {"type": asked.type}

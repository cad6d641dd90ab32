"""Conversations and tools of gRPC clients as the bodies of the HTTP endpoints have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from pydantic_core import from_json

from planner.errors import InvalidRequest
from protos import inference_pb2 as pb

_MODES: Final = {pb.TOOL_MODE_AUTO: "auto", pb.TOOL_MODE_NONE: "none", pb.TOOL_MODE_REQUIRED: "required"}


def conversation_fields(conversation: pb.Conversation) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    refuse_unknown(conversation)
    body: dict[str, Any] = {"messages": [_message(message) for message in conversation.messages]}
    for name in ("add_generation_prompt", "continue_final_message"):
        if conversation.HasField(name):
            body[name] = getattr(conversation, name)
    if conversation.HasField("chat_template_kwargs"):
        body["chat_template_kwargs"] = json_object(conversation.chat_template_kwargs, "chat_template_kwargs")
    return body


def tool_fields(request: pb.GenerateRequest) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    body = offered_tools(request.tools)
    if request.HasField("tool_choice"):
        refuse_unknown(request.tool_choice)
        match request.tool_choice.WhichOneof("choice"):
            case "function":
                body["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice.function}}
            case "mode" if request.tool_choice.mode in _MODES:
                body["tool_choice"] = _MODES[request.tool_choice.mode]
            case _:
                raise InvalidRequest("tool_choice names no mode that is known, and no function", param="tool_choice")
    return body


def offered_tools(tools: Sequence[pb.Tool]) -> dict[str, Any]:
    """Raises `InvalidRequest`."""
    told = [_tool(tool, f"tools[{place}].parameters") for place, tool in enumerate(tools)]
    return {"tools": told} if told else {}


def json_object(text: str, param: str) -> dict[str, Any]:
    """Raises `InvalidRequest` where the text is no JSON object."""
    value = json_value(text, param)
    if not isinstance(value, dict):
        raise InvalidRequest(f"{param} is no JSON object", param=param)
    return value


def json_value(text: str, param: str) -> Any:
    """Raises `InvalidRequest` where the text is not JSON."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error


def refuse_unknown(message: Message) -> None:
    """Raises `InvalidRequest` for a field that a newer client knows: dropping it would answer another request."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(f"{message.DESCRIPTOR.full_name} has no field of number {number} here")


def _message(message: pb.Message) -> dict[str, Any]:
    refuse_unknown(message)
    body: dict[str, Any] = {"role": message.role, "content": message.content}
    for ours, theirs in (("name", "name"), ("tool_call_id", "tool_call_id"), ("reasoning", "reasoning_content")):
        if message.HasField(ours):
            body[theirs] = getattr(message, ours)
    if message.tool_calls:
        body["tool_calls"] = [_call(call) for call in message.tool_calls]
    return body


def _call(call: pb.ToolCall) -> dict[str, Any]:
    refuse_unknown(call)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _tool(tool: pb.Tool, param: str) -> dict[str, Any]:
    refuse_unknown(tool)
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = json_object(tool.parameters, param)
    return {"type": "function", "function": function}

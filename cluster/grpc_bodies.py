"""From the messages of gRPC clients to the bodies of the HTTP endpoints, which validate them: there is one validation.

What is not set in a message is absent from the body. A field that a newer client knows and this code does not is
refused, since dropping it would answer another request than was asked.
"""

from __future__ import annotations

import json
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from cluster.bodies import validate
from planner.errors import InvalidRequest
from protos import inference_pb2 as pb
from protos.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody

_TOLD_APART: Final = frozenset({"prompt", "token_ids", "conversation", "text", "logit_bias", "logprobs", "json_schema"})
"""Fields that a body has under another name or in another shape; all others go over as they are."""


def generation_body(request: pb.GenerateRequest) -> CompletionBody | ChatBody:
    """Raises `InvalidRequest` that names the field at fault."""
    body = _shared(request)
    if request.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    if request.HasField("json_schema"):
        body["response_format"] = _schema_format(request.json_schema)
    scored = request.HasField("logprobs")
    if request.WhichOneof("input") == "conversation":
        if scored:
            body |= {"logprobs": True, "top_logprobs": request.logprobs}
        return validate(ChatBody, body | _conversation(request.conversation))
    if scored:
        body["logprobs"] = request.logprobs
    if request.WhichOneof("input") == "token_ids":
        _refuse_unknown(request.token_ids)
        body["prompt"] = list(request.token_ids.ids)
    elif request.WhichOneof("input") == "prompt":
        body["prompt"] = request.prompt
    return validate(CompletionBody, body)


def tokenize_body(request: pb.TokenizeRequest) -> TokenizeTextBody | TokenizeChatBody:
    """Raises `InvalidRequest`."""
    body = _shared(request)
    if request.WhichOneof("input") == "conversation":
        return validate(TokenizeChatBody, body | _conversation(request.conversation))
    return validate(TokenizeTextBody, body | ({"prompt": request.text} if request.HasField("text") else {}))


def detokenize_body(request: pb.DetokenizeRequest) -> DetokenizeBody:
    """Raises `InvalidRequest`."""
    return validate(DetokenizeBody, _shared(request) | {"tokens": list(request.token_ids)})


def _shared(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; repeated ones as lists."""
    _refuse_unknown(message)
    fields = [(field, value) for field, value in message.ListFields() if field.name not in _TOLD_APART]
    return {field.name: list(value) if field.is_repeated else value for field, value in fields}


def _conversation(conversation: pb.Conversation) -> dict[str, Any]:
    body = _shared(conversation)
    body["messages"] = []
    for message in conversation.messages:
        named = {"name": message.name} if message.HasField("name") else {}
        _refuse_unknown(message)
        body["messages"].append({"role": message.role, "content": message.content, **named})
    return body


def _schema_format(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(f"json_schema is not JSON: {error}", param="json_schema") from error
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _refuse_unknown(message: Message) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        number = unknown[0].field_number
        raise InvalidRequest(f"{message.DESCRIPTOR.full_name} has no field of number {number} here")

"""From the messages of gRPC clients to the bodies of the HTTP endpoints, which validate them: there is one validation.

What is not set in a message is absent from the body. A field that a newer client knows and this code does not is
refused, since dropping it would answer another request than was asked.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import Message

from cluster.rpc.conversation import conversation_fields, json_value, offered_tools, refuse_unknown, tool_fields
from cluster.web.bodies import validate
from planner.errors import InvalidRequest
from protos import inference_pb2 as pb
from protos.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from protos.openai_embeddings import EmbeddingBody

_TOLD_APART: Final = frozenset(
    (
        *("prompt", "token_ids", "conversation", "text", "texts", "logit_bias", "logprobs", "pooling"),
        *("json_schema", "json_object", "regex", "choice", "grammar", "tools", "tool_choice"),
    )
)
"""Fields that a body has under another name or in another shape; all others go over as they are."""

_POOLINGS: Final = {pb.POOLING_LAST: "last", pb.POOLING_MEAN: "mean"}


def generation_body(request: pb.GenerateRequest) -> CompletionBody | ChatBody:
    """Raises `InvalidRequest` that names the field at fault."""
    body = _shared(request) | _form(request) | tool_fields(request)
    if request.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in request.logit_bias.items()}
    scored = request.HasField("logprobs")
    if request.WhichOneof("input") == "conversation":
        if scored:
            body |= {"logprobs": True, "top_logprobs": request.logprobs}
        return validate(ChatBody, body | conversation_fields(request.conversation))
    if scored:
        body["logprobs"] = request.logprobs
    if request.WhichOneof("input") == "token_ids":
        body["prompt"] = _ids(request.token_ids)
    elif request.WhichOneof("input") == "prompt":
        body["prompt"] = request.prompt
    return validate(CompletionBody, body)


def tokenize_body(request: pb.TokenizeRequest) -> TokenizeTextBody | TokenizeChatBody:
    """Raises `InvalidRequest`."""
    body = _shared(request) | offered_tools(request.tools)
    if request.WhichOneof("input") == "conversation":
        return validate(TokenizeChatBody, body | conversation_fields(request.conversation))
    return validate(TokenizeTextBody, body | ({"prompt": request.text} if request.HasField("text") else {}))


def detokenize_body(request: pb.DetokenizeRequest) -> DetokenizeBody:
    """Raises `InvalidRequest`."""
    return validate(DetokenizeBody, _shared(request) | {"tokens": list(request.token_ids)})


def embedding_body(request: pb.EmbedRequest) -> EmbeddingBody:
    """Raises `InvalidRequest`."""
    body = _shared(request)
    if request.texts and request.token_ids:
        raise InvalidRequest("texts and token_ids exclude each other", param="token_ids")
    body["input"] = list(request.texts) or [_ids(ids) for ids in request.token_ids]
    if request.pooling != pb.POOLING_UNSPECIFIED:
        if request.pooling not in _POOLINGS:
            raise InvalidRequest(f"pooling {request.pooling} is not known here", param="pooling")
        body["pooling"] = _POOLINGS[request.pooling]
    return validate(EmbeddingBody, body)


def _shared(message: Message) -> dict[str, Any]:
    """The fields that are set, by name; repeated ones as lists."""
    refuse_unknown(message)
    fields = [(field, value) for field, value in message.ListFields() if field.name not in _TOLD_APART]
    return {field.name: list(value) if field.is_repeated else value for field, value in fields}


def _form(request: pb.GenerateRequest) -> dict[str, Any]:
    match request.WhichOneof("form"):
        case "json_schema":
            schema = json_value(request.json_schema, "json_schema")
            told = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            return {"response_format": told}
        case "json_object" if request.json_object:
            return {"response_format": {"type": "json_object"}}
        case "regex":
            return {"guided_regex": request.regex}
        case "choice":
            refuse_unknown(request.choice)
            return {"guided_choice": list(request.choice.texts)}
        case "grammar":
            return {"guided_grammar": request.grammar}
    return {}


def _ids(token_ids: pb.TokenIds) -> list[int]:
    refuse_unknown(token_ids)
    return list(token_ids.ids)

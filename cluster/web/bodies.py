"""From the bytes of an HTTP request to a validated body, or to the error that says what is wrong with them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from planner.errors import BodyTooLarge, BodyTooSlow, InvalidRequest
from protos.openai_body import RefusedField

B = TypeVar("B", bound=BaseModel)
SHOWN_CHARACTERS: Final = 40
"""Longer texts are not quoted in errors."""


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """All bytes of the body. Raises `BodyTooLarge` as soon as they are known to be over `max_bytes`, and `BodyTooSlow`
    where they are not there after `timeout_s` seconds."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise BodyTooLarge(f"the body has {length} bytes; at most {max_bytes} are read")
    received = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for piece in request.stream():
                received += piece
                if len(received) > max_bytes:
                    raise BodyTooLarge(f"the body has more than the {max_bytes} bytes that are read")
    except TimeoutError as error:
        raise BodyTooSlow(f"{len(received)} bytes of the body came within {timeout_s:g} s, and not all") from error
    except ClientDisconnect as error:
        raise InvalidRequest("the body broke off") from error
    return bytes(received)


def parse_object(data: bytes, what: str = "the body") -> dict[str, Any]:
    """The JSON object in `data`, which errors call `what`. Raises `InvalidRequest`; also for nesting too deep, broken
    UTF-8, NaN."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"{what} must be a JSON object")
    return value


def validate(kind: type[B], value: dict[str, Any]) -> B:
    """`value` as a `kind`. Raises `InvalidRequest` for the first thing that is wrong, naming the field."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from error


def _explain(details: ErrorDetails) -> InvalidRequest:
    """One error, in one sentence; `param` is the field of the body that it is about."""
    refused = details.get("ctx", {}).get("error")
    where = [part for part in details["loc"] if not str(part).startswith("<")]  # tags of shapes, not names of fields
    if isinstance(refused, RefusedField):
        param = str(where[0]) if where else refused.param
        return InvalidRequest(f"{_path(where)}: {refused}" if where else str(refused), param=param)
    if details["type"] == "missing":
        return InvalidRequest(f"{_path(where)} is missing", param=str(where[0]))
    sentence = (details["msg"][0].lower() + details["msg"][1:]).replace(" after validation", "")
    given = "" if ", not " in sentence else f", not {_shown(details['input'])}"
    return InvalidRequest(f"{_path(where)}: {sentence}{given}", param=str(where[0]) if where else None)


def _shown(value: Any) -> str:
    """A value of JSON, as short as a sentence bears."""
    if isinstance(value, dict):
        kind = value.get("type")
        return f"an object of type {_shown(kind)}" if isinstance(kind, str) else "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str) and len(value) > SHOWN_CHARACTERS:
        return f"a text of {len(value)} characters"
    return json.dumps(value, ensure_ascii=False)


def _path(where: list[str | int]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where).lstrip(".")

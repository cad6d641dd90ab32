"""The page of the HTTP endpoints, out of the schema that validates them."""

from __future__ import annotations

import inspect
from typing import Any, Final

from pydantic import BaseModel

from cluster.errors import OUTCOMES
from docs.site.endpoints import ENDPOINTS
from docs.site.http_words import FIELDS, OF_ONE_BODY
from docs.site.tables import cell, table
from protos import openai_answers, openai_batches, openai_embeddings, openai_response_answers
from protos.openai_answers import Answer
from protos.openai_body import Body

HEAD: Final = """# HTTP

<!-- Written by `python -m docs.site.write`, out of the schema; not to be changed by hand. -->

The endpoints are OpenAI's where OpenAI has them. Types are strict; a null is a field that was not given; a field that
is unknown, or known and not supported, is refused by name. Errors are OpenAI's error objects: message, type, param and
code. What headers say is in [the introduction](../README.md). The same for programs: [openapi.json](openapi.json).

## Endpoints
"""


def http_page() -> str:
    """Markdown with the endpoints, their bodies field by field, their answers, and the table of errors."""
    rows = [[f"`{one.method} {one.path}`", one.what, *map(_links, (one.bodies, one.answers))] for one in ENDPOINTS]
    sections = [HEAD, table(["endpoint", "what it does", "takes", "gives"], rows)]
    for one in ENDPOINTS:
        sections += [_body(body) for body in one.bodies]
    sections.append("## Inside bodies\n")
    parts = _parts()
    sections += [_part(name, part, parts) for name, part in sorted(parts.items()) if part.get("type") == "object"]
    sections.append("## Answers\n\nChunks of a stream leave out what was not set.\n")
    sections += [_answer(answer) for answer in _answers()]
    sections.append(_errors())
    return "\n".join(sections)


def _body(body: type[Body]) -> str:
    """Every field with its type, range and default; then those that are refused."""
    schema = body.model_json_schema(by_alias=True)
    required = schema.get("required", [])
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in required else _default(field)
        words = OF_ONE_BODY.get((body.__name__, name), FIELDS[name])
        rows.append([f"`{name}`", cell(_kind(field, schema.get("$defs", {}))), default, words])
    text = f"## {body.__name__}\n\n{inspect.cleandoc(body.__doc__ or '')}\n\n"
    text += table(["field", "type", "default", "what it does"], rows)
    if body.unsupported:
        refused = ", ".join(f"`{name}`" for name in sorted(body.unsupported))
        text += f"\nRefused by name unless they ask for nothing special: {refused}.\n"
    return text


def _part(name: str, part: dict[str, Any], parts: dict[str, Any]) -> str:
    """An object that bodies hold; its description says what its fields do."""
    required = part.get("required", [])
    rows = [
        [f"`{field}`", cell(_kind(kind, parts)), "required" if field in required else _default(kind)]
        for field, kind in part["properties"].items()
    ]
    told = f"{part['description']}\n\n" if "description" in part else ""
    return f"### {name}\n\n{told}{table(['field', 'type', 'default'], rows)}"


def _parts() -> dict[str, Any]:
    """By name, the schemas of all that is inside bodies."""
    bodies = [body for one in ENDPOINTS for body in one.bodies]
    parts: dict[str, Any] = {}
    for body in bodies:
        parts |= body.model_json_schema(by_alias=True).get("$defs", {})
    return parts


def _answer(answer: type[Answer]) -> str:
    schema = answer.model_json_schema()
    rows = [
        [f"`{name}`", cell(_kind(field, schema.get("$defs", {}))), "" if name in schema.get("required", []) else "yes"]
        for name, field in schema["properties"].items()
    ]
    told = f"{inspect.cleandoc(answer.__doc__)}\n\n" if answer.__doc__ else ""
    return f"### {answer.__name__}\n\n{told}{table(['field', 'type', 'may be absent'], rows)}"


def _answers() -> list[type[Answer]]:
    """Those of all endpoints and what is inside them, in the order of the schema's file."""
    found = [
        kind
        for module in (openai_answers, openai_response_answers, openai_embeddings, openai_batches)
        for kind in vars(module).values()
    ]
    answers = [kind for kind in found if isinstance(kind, type) and issubclass(kind, Answer) and kind is not Answer]
    return list(dict.fromkeys(answers))


def _errors() -> str:
    rows = [
        [f"{row.status}", f"`{row.type}`", f"`{error.code}`", row.grpc, "" if row.retry_after_s is None else "yes"]
        for error, row in sorted(OUTCOMES.items(), key=lambda item: item[1].status)
    ]
    head = ["status", "type", "code", "gRPC", "Retry-After"]
    return f"## Errors\n\nAn error below one of these has its status; `code` is its own.\n\n{table(head, rows)}"


def _links(kinds: tuple[type[BaseModel], ...]) -> str:
    return " or ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in kinds)


def _default(field: dict[str, Any]) -> str:
    return f"`{str(field['default']).lower()}`" if field.get("default") not in (None, [], {}) else ""


def _kind(field: dict[str, Any], known: dict[str, Any]) -> str:
    """A type in words: `integer, 0 to 20`, `list of text`, the alternatives of a union."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return name if known[name].get("type") == "object" else _kind(known[name], known)
    for union in ("anyOf", "oneOf"):
        if union in field:
            parts = [_kind(part, known) for part in field[union] if part.get("type") != "null"]
            return " or ".join(dict.fromkeys(parts))
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    match field.get("type"):
        case "array":
            most = f" (at most {field['maxItems']})" if "maxItems" in field else ""
            return f"list of {_kind(field['items'], known).partition(',')[0]}{most}"
        case "object":
            values = field.get("additionalProperties")
            return f"object of {_kind(values, known)}" if isinstance(values, dict) else "object"
        case "string":
            return "text"
        case "integer" | "number":
            return f"{field['type']}{_range(field)}"
        case None:
            return "any JSON"
        case other:
            return str(other)


def _range(field: dict[str, Any]) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    if high is None and isinstance(above := field.get("exclusiveMaximum"), int):
        high = above - 1
    high = None if high is not None and high >= 2**31 - 1 else high
    if low is None or low < -1:
        return "" if high is None else f", up to {high}"
    return f", at least {low}" if high is None else f", {low} to {high}"

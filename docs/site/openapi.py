"""The HTTP endpoints as an OpenAPI document, for programs that make clients or tests of it."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from cluster.version import VERSION
from docs.site.endpoints import ENDPOINTS, Endpoint

REFERENCE: Final = "#/components/schemas/{model}"
ERROR: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi() -> str:
    """The document, as JSON of OpenAPI 3.1."""
    bodies: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (body, "validation") for one in ENDPOINTS for body in one.bodies
    ]
    answers: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        (answer, "serialization") for one in ENDPOINTS for answer in one.answers
    ]
    references, schemas = models_json_schema(bodies + answers, ref_template=REFERENCE)
    names = {kind.__name__: schema["$ref"] for (kind, _), schema in references.items()}
    paths: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, names)
    document = {
        "openapi": "3.1.0",
        "info": {"title": "Raycomb", "version": VERSION},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"] | {"Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _operation(one: Endpoint, names: dict[str, str]) -> dict[str, Any]:
    error = {"description": "an error", "content": _json({"$ref": REFERENCE.format(model="Error")})}
    operation: dict[str, Any] = {
        "summary": re.sub(r" ?\(?\[(.+?)\]\(\S+?\)\)?", r" \1", one.what).strip(),
        "responses": {"200": {"description": "done"}, "4XX": error, "5XX": error},
    }
    if one.answers:
        whole, *chunks = [{"$ref": names[answer.__name__]} for answer in one.answers]
        content = _json(whole)
        if one.streams:
            content |= {"text/event-stream": {"schema": {"type": "string"}}}
        operation["responses"]["200"]["content"] = content
        if chunks:
            operation["responses"]["200"]["description"] = "done; in a stream each event is a chunk of it"
    if one.bodies:
        alternatives = [{"$ref": names[body.__name__]} for body in one.bodies]
        schema = alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}
        needed = any(field.is_required() for body in one.bodies for field in body.model_fields.values())
        operation["requestBody"] = {"required": needed, "content": _json(schema)}
    if parameters := re.findall(r"{(\w+)}", one.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters
        ]
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}

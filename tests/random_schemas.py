"""Random JSON schemas of the kinds that clients send: nesting, enums, patterns, bounds, references, recursion.

Every one of them can be satisfied, and by a short value: recursion is always optional, and lists are short.
"""

from __future__ import annotations

import json
import random
from typing import Any

Schema = dict[str, Any]

_WORDS = ("name", "age", "tags", "street", "größe", "is_open", "price", "next", "left", "right", "x-y", "città", "id")
_PATTERNS = (
    "^[A-Z]{2}[0-9]{3}$",
    "^[a-c]+$",
    "^(yes|no)$",
    "[0-9]{1,4}",
    r"^\d{4}-\d{2}$",
    "^#[0-9a-f]{6}$",
    "^.{1,5}$",
)
_FORMATS = ("uuid", "ipv4")


def random_schema(seed: int) -> Schema:
    """An object's schema, the same for the same seed."""
    maker = _Maker(random.Random(seed))
    schema = maker.object(depth=0)
    if maker.definitions:
        schema["$defs"] = maker.definitions
    return schema


class _Maker:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.definitions: dict[str, Schema] = {}

    def schema(self, depth: int) -> Schema:
        kinds = [self.string, self.number, self.enum, self.boolean, self.constant, self.nullable]
        if depth < 3:
            kinds += [self.object, self.array, self.either, self.reference, self.tree, self.tuple]
        return self._draw.choice(kinds)(depth)

    def object(self, depth: int) -> Schema:
        names = self._draw.sample(_WORDS, self._draw.randint(1, 4))
        optional = self._draw.random() < 0.3
        made: Schema = {"type": "object", "properties": {name: self.schema(depth + 1) for name in names}}
        made["required"] = [name for name in names if not optional or self._draw.random() < 0.6]
        made["additionalProperties"] = False
        return made

    def array(self, depth: int) -> Schema:
        low = self._draw.randint(0, 2)
        return {"type": "array", "items": self.schema(depth + 1), "minItems": low, "maxItems": low + 1}

    def tuple(self, depth: int) -> Schema:
        items = [self.schema(depth + 1) for _ in range(self._draw.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def string(self, depth: int) -> Schema:
        kind = self._draw.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self._draw.choice(_PATTERNS), "maxLength": 12}
        if kind == 1:
            return {"type": "string", "format": self._draw.choice(_FORMATS)}
        low = self._draw.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + self._draw.randint(0, 9)}

    def number(self, depth: int) -> Schema:
        low = self._draw.randint(-1000, 1000)
        made: Schema = {"type": self._draw.choice(["integer", "number"])}
        made[self._draw.choice(["minimum", "exclusiveMinimum"])] = low
        made[self._draw.choice(["maximum", "exclusiveMaximum"])] = low + self._draw.randint(2, 5000)
        return made

    def enum(self, depth: int) -> Schema:
        values = ["red", "green", "blue", 1, 2.5, True, None, 'a "quoted" one', "naïve"]
        return {"enum": self._draw.sample(values, self._draw.randint(1, 5))}

    def boolean(self, depth: int) -> Schema:
        return {"type": "boolean"}

    def constant(self, depth: int) -> Schema:
        return {"const": self._draw.choice(["fixed", 7, False, None, {"a": [1, 2]}])}

    def nullable(self, depth: int) -> Schema:
        return {"type": [self._draw.choice(["integer", "boolean"]), "null"]}

    def either(self, depth: int) -> Schema:
        return {"anyOf": [self.schema(depth + 1) for _ in range(self._draw.randint(2, 3))]}

    def reference(self, depth: int) -> Schema:
        return {"$ref": f"#/$defs/{self._define(self.object(depth + 1))}"}

    def tree(self, depth: int) -> Schema:
        name = f"node{len(self.definitions)}"
        self.definitions[name] = {}
        again = {"$ref": f"#/$defs/{name}"}
        self.definitions[name] = {
            "type": "object",
            "properties": {"value": self.schema(3), "next": {"anyOf": [{"type": "null"}, again]}},
            "required": ["value", "next"],
            "additionalProperties": False,
        }
        return again

    def _define(self, schema: Schema) -> str:
        text = json.dumps(schema)
        for name, known in self.definitions.items():
            if json.dumps(known) == text:
                return name
        name = f"part{len(self.definitions)}"
        self.definitions[name] = schema
        return name

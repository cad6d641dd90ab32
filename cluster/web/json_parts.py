"""JSON of long answers, written in parts.

One call of the serializer holds the interpreter's lock until it has ended, on whatever thread: over a million log
probabilities everything else would stand still. Between parts it does not. Items are best plain numbers, texts and
dictionaries of them: a model an item, and the collector of garbage takes as long as the serializer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final

from pydantic_core import to_json

from protos.openai_answers import Answer

ITEMS_AT_ONCE: Final = 256


def json_list(items: Iterable[object]) -> bytes:
    """The items as a JSON list; they are taken as they are written."""
    left = iter(items)
    parts = []
    while part := list(islice(left, ITEMS_AT_ONCE)):
        parts.append(to_json(part, inf_nan_mode="null")[1:-1])
    return b"[" + b",".join(parts) + b"]"


def json_columns(num_rows: int, columns: Mapping[str, Iterable[object]]) -> bytes:
    """An object of lists, which all have `num_rows` items."""
    if num_rows <= ITEMS_AT_ONCE:
        return to_json({name: list(column) for name, column in columns.items()}, inf_nan_mode="null")
    return json_object({name: json_list(column) for name, column in columns.items()})


def json_object(fields: Mapping[str, bytes]) -> bytes:
    """An object of fields whose values are JSON."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def with_fields(value: Answer, fields: Mapping[str, bytes]) -> bytes:
    """The JSON of `value` with these fields, which are JSON already, in the place of its own of their names. It must
    have others."""
    if not fields:
        return value.to_json()
    own = value.model_dump_json(exclude_unset=True, exclude=set(fields)).encode()
    return own[:-1] + b"," + json_object(fields)[1:]

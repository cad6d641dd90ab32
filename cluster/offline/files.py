"""The two files of an offline batch: prompts in, one JSON object a line, and answers out, in the same order.

A line that cannot be used does not stop the others: it becomes an answer with an error. Not for generating anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cluster.errors import envelope
from cluster.web.bodies import parse_object, validate
from planner.errors import InvalidRequest, RaycombError
from planner.request import sequence_seed
from protos.openai import ChatBody, CompletionBody

_OTHER_THAN_ONE_PROMPT = (
    "a line holds one prompt: a text in prompt, a list of token ids in prompt_token_ids, or a conversation in messages"
)
_OF_A_BATCH = "this is a line for /v1/batches; here a line is what its body holds, and may have an id"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the prompts file. `number` counts from 0 over all lines that are not blank; `id` is the line's own,
    or else its number. `body`: the request, or what is wrong with it."""

    number: int
    id: str | int
    body: CompletionBody | ChatBody | InvalidRequest


def read_lines(path: Path, *, seed: int) -> Iterator[Line]:
    """Read one line after another. A line without a seed gets one that follows from `seed` and its number, so that a
    batch that is run again gives the same answers."""
    number = 0
    with path.open("rb") as file:
        for raw in file:
            if raw.strip():
                yield parse_line(raw, number, sequence_seed(seed, number))
                number += 1


def parse_line(raw: bytes, number: int, seed: int) -> Line:
    """`seed` is used where the line has none."""
    name: str | int = number
    try:
        fields = parse_object(raw, "the line")
        given = fields.pop("id", None)
        if given is not None:
            if isinstance(given, bool) or not isinstance(given, str | int):
                raise InvalidRequest(f"id must be a text or an integer, not {given!r}", param="id")
            name = given
        return Line(number, name, _body(fields, seed))
    except InvalidRequest as fault:
        return Line(number, name, fault)


def _body(fields: dict[str, Any], seed: int) -> CompletionBody | ChatBody:
    if "custom_id" in fields and "body" in fields:
        raise InvalidRequest(_OF_A_BATCH, param="body")
    ids, prompt, messages = fields.pop("prompt_token_ids", None), fields.get("prompt"), fields.get("messages")
    if sum(given is not None for given in (ids, prompt, messages)) != 1:
        raise InvalidRequest(_OTHER_THAN_ONE_PROMPT, param="prompt")
    if prompt is not None and not isinstance(prompt, str):
        raise InvalidRequest(_OTHER_THAN_ONE_PROMPT, param="prompt")
    for name in ("stream", "stream_options", "echo"):
        if fields.get(name) is not None:
            raise InvalidRequest(f"{name} means nothing in a batch", param=name)
    if fields.get("seed") is None:
        fields["seed"] = seed
    if messages is not None:
        return validate(ChatBody, fields)
    return validate(CompletionBody, fields if ids is None else fields | {"prompt": ids})


def error_record(line_id: str | int, error: RaycombError) -> dict[str, Any]:
    """The output line of a prompt that got no answer."""
    return {"id": line_id, **envelope(error)}


@dataclass(slots=True)
class OrderedWriter:
    """Writes output lines in the order of the input, whatever order they are ready in. Owner: the run.

    `file` is written whole line by whole line and flushed after each, so that it never holds half a line.
    """

    file: IO[str]
    _next: int = 0
    _ready: dict[int, str] = field(default_factory=dict)

    def put(self, number: int, records: Sequence[dict[str, Any]]) -> None:
        """Take the output of input line `number`; write it as soon as those before it were written."""
        self._ready[number] = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        while (text := self._ready.pop(self._next, None)) is not None:
            self._write(text)
            self._next += 1

    def write_rest(self) -> None:
        """Write what is ready though lines before it are not: the run was broken off."""
        for number in sorted(self._ready):
            self._write(self._ready[number])
        self._ready.clear()

    def _write(self, text: str) -> None:
        self.file.write(text)
        self.file.flush()

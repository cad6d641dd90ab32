"""An answer told as /v1/responses tells it: one response, or named events in OpenAI's order."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence

from cluster.answers.answer import TokenCounts
from cluster.answers.choice import Ending, Piece
from cluster.errors import outcome, shortened
from cluster.language.message_parts import Reasoning
from cluster.language.message_reader import MessageReader, NewReader
from cluster.web.response_items import Event, ResponseItems, dump
from cluster.web.telling import event
from planner.errors import RaycombError
from protos.openai_response_answers import (
    Incomplete,
    InputDetails,
    OutputDetails,
    Response,
    ResponseError,
    ResponseUsage,
    Status,
)
from protos.openai_responses import ResponsesBody


class ResponseTelling:
    """A `cluster.web.telling.Telling` of an answer with one choice."""

    def __init__(self, body: ResponsesBody, model: str, new_reader: NewReader | None) -> None:
        """`new_reader` makes what finds thoughts and calls of tools in the text; None: all of it is content."""
        self._reader = (new_reader or MessageReader)()
        self._items = ResponseItems()
        self._num_events = 0
        self._ending: Ending | None = None
        self._num_reasoning = 0
        self._base = Response(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls,
            temperature=body.temperature,
            text={"format": body.text.format.model_dump(mode="json", by_alias=True, exclude_none=True)},
            tool_choice=body.tool_choice if isinstance(body.tool_choice, str) else dump(body.tool_choice),
            tools=[dump(tool) for tool in body.tools],
            top_p=body.top_p,
            user=body.user,
            metadata=body.metadata or {},
        )

    def events(self, pieces: Iterable[Piece]) -> bytes:
        told: list[Event] = []
        if self._num_events == 0:
            told = [Event(f"response.{word}", {"response": dump(self._base)}) for word in ("created", "in_progress")]
        return self._written([*told, *self._taken(pieces)])

    def closing(self, counts: TokenCounts) -> bytes:
        last = self._items.finish(self._status)
        told = [*last]
        return self._written([*told, Event(f"response.{self._status}", {"response": dump(self._response(counts))})])

    def failure(self, error: RaycombError) -> bytes:
        told = [*self._items.finish("incomplete")]
        code = "rate_limit_exceeded" if outcome(error).status == 429 else "server_error"
        failed = self._base.model_copy(
            update={
                "status": "failed",
                "output": self._items.done,
                "error": ResponseError(code=code, message=f"{error.code}: {shortened(error.message)}"),
            }
        )
        return self._written([*told, Event("response.failed", {"response": dump(failed)})])

    def whole(self, choices: Sequence[Sequence[Piece]], counts: TokenCounts) -> bytes:
        (pieces,) = choices
        self._taken(pieces)
        for _ in self._items.finish(self._status):
            pass
        return self._response(counts).model_dump_json().encode()

    @property
    def _status(self) -> Status:
        return "incomplete" if self._ending is Ending.LENGTH else "completed"

    def _taken(self, pieces: Iterable[Piece]) -> list[Event]:
        told: list[Event] = []
        for piece in pieces:
            parts = self._reader.push(piece.text)
            if piece.ending is not None:
                self._ending = piece.ending
                parts += self._reader.finish()
            if any(isinstance(part, Reasoning) for part in parts):
                self._num_reasoning += len(piece.tokens)
            told += self._items.push(parts)
        return told

    def _response(self, counts: TokenCounts) -> Response:
        usage = ResponseUsage(
            input_tokens=counts.prompt,
            input_tokens_details=InputDetails(cached_tokens=counts.cached),
            output_tokens=counts.completion,
            output_tokens_details=OutputDetails(reasoning_tokens=self._num_reasoning),
            total_tokens=counts.prompt + counts.completion,
        )
        cut = Incomplete(reason="max_output_tokens") if self._ending is Ending.LENGTH else None
        return self._base.model_copy(
            update={"status": self._status, "output": self._items.done, "incomplete_details": cut, "usage": usage}
        )

    def _written(self, told: Iterable[Event]) -> bytes:
        return b"".join(map(self._event, told))

    def _event(self, one: Event) -> bytes:
        value = {"type": one.type, "sequence_number": self._num_events, **one.fields}
        self._num_events += 1
        return event(json.dumps(value, ensure_ascii=False).encode(), one.type)

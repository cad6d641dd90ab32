"""What is told of one request of a client when it is over: to its span, and to the log as one line. Never what it says.

Its span lasts from its arrival at the gateway to the last byte of its answer. It stands under the span that the client
names in its headers or metadata, and above those of the runs. For requests that ask for tokens; others have none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer

from cluster.telemetry.request_log import Tell
from planner.errors import DeadlineExceeded, RaycombError, RequestRefused
from worker.tracing import TRACEPARENT, TRACESTATE, parent_of

REQUEST_ID: Final = "gen_ai.request.id"
MODEL: Final = "gen_ai.request.model"
RECORD: Final = "raycomb.record"
"""Under which an ASGI scope carries the request's record."""


@dataclass(slots=True)
class RequestRecord:
    """One request. Owner: the task that serves it. Times in seconds since its arrival.

    `status` is HTTP's; None over gRPC. `code` is that of the error that it ended with. `left`: its client did not wait
    for the end.
    """

    name: str = ""
    request_id: str = ""
    span: Span = INVALID_SPAN
    tell: Tell | None = None
    began_at: float = field(default_factory=time.monotonic)
    tenant: str = ""
    status: int | None = None
    code: str | None = None
    left: bool = False
    first_token_s: float | None = None
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    reasons: list[str] = field(default_factory=list)

    def note_model(self, name: str) -> None:
        """What it asks for, a model or an adapter, under the name that it is answered with."""
        self.span.set_attribute(MODEL, name)

    def note_status(self, status: int) -> None:
        """The answer's HTTP status; those of 500 and above are failures of ours."""
        self.status = status
        if status >= 500:
            self.span.set_status(StatusCode.ERROR)

    def note_failure(self, failure: BaseException) -> None:
        """It ended with this; a refusal is no failure of ours."""
        match failure:
            case asyncio.CancelledError() | GeneratorExit():
                self.left = True
                self.span.add_event("client_left")
            case TimeoutError():
                self.code = DeadlineExceeded.code
            case RequestRefused():
                self.code = failure.code
            case RaycombError():
                self.code = failure.code
                self.span.set_status(StatusCode.ERROR, failure.message)
            case _:
                self.code = RaycombError.code
                self.span.set_status(StatusCode.ERROR, type(failure).__name__)

    def told(self, whole_s: float) -> dict[str, Any]:
        """For a line of the log; what does not apply is left out."""
        values = {
            "request_id": self.request_id,
            "trace_id": format(self.span.get_span_context().trace_id, "032x") if self.span.is_recording() else None,
            "request": self.name,
            "tenant": self.tenant or None,
            "status": self.status,
            "error": self.code,
            "client_left": self.left or None,
            "prompt_tokens": self.num_prompt_tokens,
            "tokens": self.num_tokens,
            "finish_reasons": self.reasons or None,
            "first_token_s": None if self.first_token_s is None else round(self.first_token_s, 6),
            "seconds": round(whole_s, 6),
        }
        return {name: value for name, value in values.items() if value is not None}

    def finish(self) -> None:
        """Tell it."""
        whole_s = time.monotonic() - self.began_at
        if self.span.is_recording():
            self._tell_span(whole_s)
        if self.tell is not None:
            self.tell(self.told(whole_s))  # while the span still records
        self.span.end()

    def _tell_span(self, whole_s: float) -> None:
        span = self.span
        span.set_attribute("gen_ai.server.request.duration", whole_s)
        span.set_attribute("gen_ai.usage.input_tokens", self.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", self.num_tokens)
        if self.reasons:
            span.set_attribute("gen_ai.response.finish_reasons", tuple(self.reasons))
        if self.first_token_s is not None:
            span.set_attribute("gen_ai.server.time_to_first_token", self.first_token_s)
        if self.status is not None:
            span.set_attribute("http.response.status_code", self.status)
        if self.code is not None:
            span.set_attribute("error.type", self.code)


class RequestRecords:
    """Makes them. Owner: a gateway. `model_name` is what it serves; `tell` is told of each that is over."""

    def __init__(self, tracer: Tracer, model_name: str, tell: Tell | None) -> None:
        self._tracer = tracer
        self._tell = tell
        self._model_name = model_name

    @contextmanager
    def request(self, name: str, request_id: str, sent: Callable[[str], str]) -> Iterator[RequestRecord]:
        """Around the whole of a request that came now; `sent` gives the header or metadata of a name, or ""."""
        parent = parent_of(sent(TRACEPARENT), sent(TRACESTATE))
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, {REQUEST_ID: request_id, MODEL: self._model_name})
        record = RequestRecord(name, request_id, span, self._tell)
        try:
            yield record
        except BaseException as failure:
            if record.code is None and not record.left:
                record.note_failure(failure)
            raise
        finally:
            record.finish()

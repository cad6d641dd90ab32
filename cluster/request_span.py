"""The span of one request of a client, from its arrival at the gateway to the last byte of its answer.

It stands under the span that the client names in its headers or metadata, and above those of the runs. For requests
that ask for tokens; the others are not traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from worker.tracing import TRACEPARENT, TRACESTATE, parent_of

REQUEST_ID: Final = "gen_ai.request.id"
MODEL: Final = "gen_ai.request.model"
SPAN: Final = "raycomb.span"
"""Under which an ASGI scope carries the request's span."""


class RequestSpanMaker:
    """Owner: a gateway. `model_name` is what it serves."""

    def __init__(self, tracer: Tracer, model_name: str) -> None:
        self._tracer = tracer
        self._model_name = model_name

    @contextmanager
    def request(self, name: str, request_id: str, sent: Callable[[str], str]) -> Iterator[Span]:
        """Around the whole of a request that came now; `sent` gives the header or metadata of a name, or "".

        A failure that goes through, or that was noted as the span's status, is told; a client that leaves is none.
        """
        parent = parent_of(sent(TRACEPARENT), sent(TRACESTATE))
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, {REQUEST_ID: request_id, MODEL: self._model_name})
        try:
            yield span
        except Exception as failure:
            span.set_status(StatusCode.ERROR, type(failure).__name__)
            raise
        finally:
            span.end()


def note_status(span: Span, status: int) -> None:
    """The answer's HTTP status; those of 500 and above are failures of ours."""
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)

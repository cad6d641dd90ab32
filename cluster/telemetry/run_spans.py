"""A gateway's part of a request's trace: one span for each run, as long as one worker has it.

A worker that is killed says nothing more of itself, so it is here that a trace tells who ran what, who was lost, and
who went on. Requests without a trace cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer

from cluster.routing.run import Run
from planner.errors import RaycombError, WorkerLost
from worker.tracing import parent_of, traceparent

RUN: Final = "run"
WORKER: Final = "raycomb.worker"
NUM_LOSSES: Final = "raycomb.num_losses"
NUM_GENERATED: Final = "raycomb.num_generated"


@dataclass(frozen=True, slots=True)
class RunEnd:
    """Why a worker has a run no more. `error`: it refused it, or was lost; None: all of it ended, or was cancelled, or
    it had not begun and was asked back."""

    word: str
    error: RaycombError | None = None


ENDED: Final = RunEnd("ended")
CANCELLED: Final = RunEnd("cancelled")
MOVED: Final = RunEnd("moved")


class RunSpans:
    """Of the runs at one worker. Owner: its stream, on the gateway's event loop."""

    def __init__(self, tracer: Tracer, worker_id: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._spans: dict[int, Span] = {}  # by request id

    def start(self, request_id: int, run: Run) -> str:
        """The run is sent now. The traceparent for its worker; empty where nobody traces the request."""
        if not run.request.trace:
            return ""
        attributes: dict[str, str | int] = {WORKER: self._worker_id, NUM_LOSSES: run.num_losses}
        span = self._tracer.start_span(RUN, parent_of(run.request.trace), SpanKind.CLIENT, attributes)
        if run.num_losses:
            span.add_event("failover", {NUM_GENERATED: run.request.num_generated})
        self._spans[request_id] = span
        return traceparent(span)

    def end(self, request_id: int, end: RunEnd) -> None:
        """Harmless for a request without a span."""
        if (span := self._spans.pop(request_id, None)) is None:
            return
        span.set_attribute("raycomb.outcome", end.word)
        if end.error is not None:
            span.set_status(StatusCode.ERROR, end.error.message)
            span.set_attribute("error.type", end.error.code)
        if isinstance(end.error, WorkerLost):
            span.add_event("worker_lost", {WORKER: self._worker_id})
        span.end()


def refused(error: RaycombError) -> RunEnd:
    return RunEnd("refused", error)


def lost(error: WorkerLost) -> RunEnd:
    return RunEnd("lost", error)

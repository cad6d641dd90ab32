"""A worker's part of a request's trace: one span for each phase, under the gateway's span of the run.

The phases follow each other: it waits in the queue, its prompt is prefilled, it decodes. Each span is sent when its
phase ends, so that of a worker that is killed all but the last one are known. Requests without a trace cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer

from planner.move import Move, MoveKind
from planner.request import FinishReason, Request, Update
from worker.tracing import parent_of

EVENTS: Final = {MoveKind.PREEMPTED: "preempted", MoveKind.RESUMED: "resumed"}


class Phase(Enum):
    """What a request does at its worker, and the name of its span."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(slots=True)
class _Traced:
    """A request with a trace. `live`: how many of its sequences have not ended."""

    parent: Context
    span: Span
    phase: Phase
    live: int
    num_prompt: int
    num_tokens: int = 0
    num_cached: int = 0
    reasons: list[str] = field(default_factory=list)


class RequestSpans:
    """Owner: the engine thread. Requests are known by the planner's ids."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._traced: dict[int, _Traced] = {}

    def queued(self, request_id: int, request: Request) -> None:
        """It was accepted now."""
        if request.trace:
            parent = parent_of(request.trace)
            span = self._tracer.start_span(Phase.QUEUE.value, parent)
            self._traced[request_id] = _Traced(parent, span, Phase.QUEUE, request.n, len(request.prompt))

    def moved(self, moves: Collection[Move]) -> None:
        """Requests got a seat or lost it now."""
        if not self._traced:
            return
        for move in moves:
            if (traced := self._traced.get(move.request_id)) is None:
                continue
            if move.kind is MoveKind.ADMITTED:
                self._go_on(traced, Phase.PREFILL)
            else:
                traced.span.add_event(EVENTS[move.kind])

    def note(self, updates: Iterable[Update]) -> None:
        """These updates came of a step, or of an end without one."""
        if not self._traced:
            return
        for update in updates:
            if (traced := self._traced.get(update.request_id)) is None:
                continue
            if update.tokens:
                traced.num_tokens += len(update.tokens)
                if traced.phase is Phase.PREFILL:
                    traced.num_cached = update.num_cached_tokens
                    self._go_on(traced, Phase.DECODE)
            if update.finish_reason is not None:
                self._end_sequence(update, traced)

    def close(self) -> None:
        """The engine ends: what has no end yet was given up."""
        for traced in self._traced.values():
            traced.span.set_status(StatusCode.ERROR, "the worker's engine ended")
            self._end(traced, time.time_ns())
        self._traced.clear()

    def _go_on(self, traced: _Traced, phase: Phase) -> None:
        now = time.time_ns()
        self._end(traced, now)
        traced.phase = phase
        traced.span = self._tracer.start_span(phase.value, traced.parent, start_time=now)

    def _end_sequence(self, update: Update, traced: _Traced) -> None:
        assert update.finish_reason is not None, "an end has a reason"
        traced.reasons.append(update.finish_reason.value)
        if update.finish_reason is FinishReason.FAILED and update.error is not None:
            traced.span.set_status(StatusCode.ERROR, update.error.message)
            traced.span.set_attribute("error.type", update.error.code)
        traced.live -= 1
        if traced.live == 0:
            del self._traced[update.request_id]
            self._end(traced, time.time_ns())

    def _end(self, traced: _Traced, now: int) -> None:
        span = traced.span
        if traced.phase is Phase.PREFILL:
            span.set_attribute("gen_ai.usage.input_tokens", traced.num_prompt)
            span.set_attribute("raycomb.cached_tokens", traced.num_cached)
        elif traced.phase is Phase.DECODE:
            span.set_attribute("gen_ai.usage.output_tokens", traced.num_tokens)
        if traced.reasons:
            span.set_attribute("gen_ai.response.finish_reasons", tuple(traced.reasons))
        span.end(now)

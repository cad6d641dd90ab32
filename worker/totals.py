"""What a worker has counted since it started: values that only grow, published whole for whoever exports them.

Not for decisions: those read `planner.limits.Snapshot`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from planner.metrics import Metrics
from planner.move import Move, MoveKind
from planner.request import FinishReason
from planner.slices import Method
from worker.distribution import Distribution, Histogram
from worker.stats import StepKind

PERIOD_S: Final = 0.2
"""Totals are taken so often while the engine is busy, and whenever it becomes idle."""

STEP_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
QUEUE_BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SLACK: Final = 64

NO_QUEUE: Final = Histogram(QUEUE_BOUNDS_S).distribution


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the worker started. Times in seconds.

    * `tokens_forced`: those of the generated ones that a grammar left no choice in, fed at once.
    * `decode_forwards`: forwards of the decode method by their width; `padded_rows`: their rows that held no token.
    * `prefix_queries`: prompt tokens that were looked up; `prefix_hits`: those of them that were resident.
    * `cells_swapped_out`, `cells_swapped_in`: cells copied to host memory for a preempted sequence, and back.
    * `finished`: sequences, by how they ended.
    * `streams_refused`: streams of the data plane that were opened without its secret.
    * `queue_time`: of each request, from its arrival at the engine until it was first scheduled.
    * `step_time`: of each step, by what it ran.
    """

    prompt_tokens_computed: int = 0
    tokens_generated: int = 0
    tokens_forced: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    padded_rows: int = 0
    prefill_forwards: int = 0
    decode_forwards: Mapping[int, int] = field(default_factory=dict)
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    cells_swapped_out: int = 0
    cells_swapped_in: int = 0
    streams_refused: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    queue_time: Distribution = NO_QUEUE
    step_time: Mapping[StepKind, Distribution] = field(default_factory=dict)


class Tally:
    """What the engine counts beside its planner, and the totals of both. Owner: the engine thread."""

    def __init__(self, metrics: Metrics, live: Collection[int]) -> None:
        """`live`: a view of the ids of the requests that have not ended."""
        self._metrics = metrics
        self._live = live
        self._queued_at: dict[int, float] = {}
        self._queue_time = Histogram(QUEUE_BOUNDS_S)
        self._step_time = {kind: Histogram(STEP_BOUNDS_S) for kind in StepKind}
        self._taken_at = 0.0

    def queued(self, request_id: int, now: float) -> None:
        self._queued_at[request_id] = now
        if len(self._queued_at) > 2 * len(self._live) + SLACK:  # of those that ended while they waited
            self._queued_at = {key: at for key, at in self._queued_at.items() if key in self._live}

    def moved(self, moves: Collection[Move], now: float) -> None:
        for move in moves:
            if move.kind is MoveKind.ADMITTED and (queued_at := self._queued_at.pop(move.request_id, None)) is not None:
                self._queue_time.observe(now - queued_at)

    def step(self, kind: StepKind, duration_s: float) -> None:
        self._step_time[kind].observe(duration_s)

    def due(self, now: float) -> bool:
        """Whether it is time to take totals; says so once a period."""
        if now - self._taken_at < PERIOD_S:
            return False
        self._taken_at = now
        return True

    def totals(self) -> Totals:
        metrics = self._metrics
        return Totals(
            prompt_tokens_computed=metrics.num_prompt_tokens_computed,
            tokens_generated=metrics.num_tokens_generated,
            tokens_forced=metrics.num_tokens_forced,
            decode_tokens=metrics.num_tokens[Method.DECODE],
            prefill_tokens=metrics.num_tokens[Method.PREFILL],
            padded_rows=metrics.num_padded_rows,
            prefill_forwards=metrics.num_forwards[Method.PREFILL],
            decode_forwards=dict(metrics.num_decodes),
            prefix_queries=metrics.num_prefix_queries,
            prefix_hits=metrics.num_prefix_hits,
            preemptions=metrics.num_preemptions,
            cells_swapped_out=metrics.num_cells_swapped_out,
            cells_swapped_in=metrics.num_cells_swapped_in,
            finished=dict(metrics.finished),
            queue_time=self._queue_time.distribution,
            step_time={kind: histogram.distribution for kind, histogram in self._step_time.items()},
        )

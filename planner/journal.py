"""A planner's life as lines of JSON: what it was asked, in order, and what it planned. Enough to live it again.

The planner has no clock and no other source of chance, so the same questions give the same plans. Token ids are in
the lines: whoever keeps a journal keeps the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict
from typing import Any, Final

from planner.errors import RequestFailed
from planner.limits import Limits
from planner.planner import Planner
from planner.request import Request, Update
from planner.step import ChunkOutput, Step, StepResult

FORMAT: Final = "raycomb-steps/1"

Line = dict[str, Any]
Write = Callable[[Line], None]


class JournaledPlanner(Planner):
    """Tells `write` of every call that changes it, before it is made or, for plans, after."""

    def __init__(self, limits: Limits, write: Write) -> None:
        self._write = write
        super().__init__(limits)
        write({"format": FORMAT, "limits": limits_to_json(limits)})

    def submit(self, request: Request) -> int:
        request_id = super().submit(request)
        self._write({"submit": request_id, "request": request_to_json(request)})
        return request_id

    def cancel(self, request_id: int, indices: Collection[int] | None = None) -> list[Update]:
        self._write({"cancel": request_id, "indices": None if indices is None else sorted(indices)})
        return super().cancel(request_id, indices)

    def fail(self, request_id: int, error: RequestFailed) -> list[Update]:
        self._write({"fail": request_id, "code": error.code})
        return super().fail(request_id, error)

    def fail_all(self, error: RequestFailed) -> list[Update]:
        self._write({"fail_all": error.code})
        return super().fail_all(error)

    def plan(self) -> Step | None:
        step = super().plan()
        self._write({"plan": None} if step is None else {"plan": step.number, **step_to_json(step)})
        return step

    def commit(self, step: Step, result: StepResult) -> list[Update]:
        outcomes = [_outcome_to_json(outcome) for outcome in result.outcomes]
        self._write({"commit": step.number, "outcomes": outcomes})
        return super().commit(step, result)


def _outcome_to_json(outcome: ChunkOutput | RequestFailed) -> str | int | list[int | None] | None:
    """An error's code, the token, or a token and what has to follow it."""
    if isinstance(outcome, RequestFailed):
        return outcome.code
    return [outcome.token, *outcome.forced] if outcome.forced else outcome.token


def step_to_json(step: Step) -> Line:
    """What of a step must come out the same when it is planned again."""
    return {
        "chunks": [[chunk.sequence_id, chunk.start, chunk.length, chunk.samples] for chunk in step.chunks],
        "slices": [[piece.offset, piece.length, piece.method.value] for piece in step.slices],
    }


def limits_to_json(limits: Limits) -> Line:
    return asdict(limits) | {"tenant_weights": dict(limits.tenant_weights)}


def limits_from_json(value: Line) -> Limits:
    return Limits(**value | {"widths": tuple(value["widths"])})


def request_to_json(request: Request) -> Line:
    return {
        "prompt": request.prompt.tolist(),
        "max_tokens": request.max_tokens,
        "sampling": asdict(request.sampling),
        "min_tokens": request.min_tokens,
        "stop_token_ids": sorted(request.stop_token_ids),
        "n": request.n,
        "priority": request.priority,
        "prompt_logprobs": request.prompt_logprobs,
        "pooling": None if request.pooling is None else request.pooling.value,
        "num_generated": request.num_generated,
        "tenant": request.tenant,
        "adapter": request.adapter,
    }

"""Lives a recorded planner's life again, offline: tells each step with its reasons, and checks the record on the way.

Needs neither the model nor the machine: what was drawn is in the record, and everything else follows from it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.account import StepAccount, account_for
from planner.errors import InvalidStepLog, RaycombError, RequestFailed, error_from_code
from planner.journal import FORMAT, Line, limits_from_json, step_to_json
from planner.limits import Limits, Snapshot
from planner.planner import Planner
from planner.request import Adapter, Pooling, Request, SamplingParams, TokenLogprobs
from planner.step import Chunk, ChunkOutput, Step, StepResult

_Recorded = int | str | list[int] | None
"""An outcome as a journal has it: a token, an error's code, a token and those that it forces, or nothing drawn."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step as it was planned again. `before` is the state before it was planned; `at` is when that was, in seconds,
    where the record tells. `as_recorded`: the record has the same chunks and slices."""

    account: StepAccount
    before: Snapshot
    at: float | None
    as_recorded: bool


def replay(lines: Iterable[str]) -> Iterator[ReplayedStep]:
    """All steps of a record, in order. A last line that is cut off is the end.

    Raises `InvalidStepLog` with the line's number for what is no record, or contradicts itself.
    """
    life: _Life | None = None
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):
            break
        try:
            value = json.loads(line)
            if life is None:
                life = _Life(_limits(value))
            elif (step := life.take(value)) is not None:
                yield step
        except json.JSONDecodeError as error:
            raise InvalidStepLog(f"line {number} is not JSON: {error.msg} at column {error.colno}") from error
        except KeyError as error:
            raise InvalidStepLog(f"line {number} has no {error}") from error
        except (
            ValueError,
            TypeError,
            AttributeError,
            IndexError,
            OverflowError,
            RecursionError,
            RaycombError,
        ) as error:
            raise InvalidStepLog(f"line {number}: {str(error) or type(error).__name__}") from error
    if life is None:
        raise InvalidStepLog("it has no whole line")


def _limits(value: Any) -> Limits:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ValueError(f"this is no step log of the format {FORMAT}")
    return limits_from_json(value["limits"])


class _Life:
    """The planner that lives again, and its steps in flight."""

    def __init__(self, limits: Limits) -> None:
        self._planner = Planner(limits)
        self._in_flight: deque[Step] = deque()

    def take(self, line: Line) -> ReplayedStep | None:
        """Do what the line says was done."""
        match line:
            case {"submit": request_id, "request": request}:
                if self._planner.submit(_request(request)) != request_id:
                    raise ValueError(f"request {request_id} does not come next")
            case {"cancel": request_id, "indices": indices}:
                self._planner.cancel(request_id, indices)
            case {"fail": request_id, "code": code}:
                self._planner.fail(request_id, _failure(code))
            case {"fail_all": code}:
                self._planner.fail_all(_failure(code))
                self._in_flight.clear()
            case {"plan": _}:
                return self._plan(line)
            case {"commit": number, "outcomes": outcomes}:
                self._commit(number, outcomes)
            case dict():
                raise ValueError(f"nothing is known of a line with {', '.join(map(str, line)) or 'nothing in it'}")
            case _:
                raise ValueError("it is not an object")
        return None

    def _plan(self, line: Line) -> ReplayedStep | None:
        before = self._planner.snapshot()
        step = self._planner.plan()
        if (step is None) != (line["plan"] is None):
            raise ValueError(f"the record has step {line['plan']} where the planner has {step and step.number}")
        if step is None:
            return None
        self._in_flight.append(step)
        as_recorded = {key: line[key] for key in ("chunks", "slices")} == step_to_json(step)
        return ReplayedStep(account_for(step, self._planner.limits), before, line.get("at"), as_recorded)

    def _commit(self, number: int, outcomes: list[_Recorded]) -> None:
        if not self._in_flight or self._in_flight[0].number != number:
            raise ValueError(f"step {number} is not the oldest in flight")
        step = self._in_flight.popleft()
        pairs = zip(step.chunks, outcomes, strict=True)
        self._planner.commit(step, StepResult([_outcome(chunk, outcome) for chunk, outcome in pairs]))


def _outcome(chunk: Chunk, outcome: _Recorded) -> ChunkOutput | RequestFailed:
    """Log probabilities and vectors are not recorded; others stand for them, since the planner reads none."""
    if isinstance(outcome, str):
        return _failure(outcome)
    num_targets = 0 if chunk.prompt_targets is None else len(chunk.prompt_targets)
    pooled = None if chunk.pooling is None else np.zeros(1, np.float32)
    token, forced = (outcome[0], tuple(outcome[1:])) if isinstance(outcome, list) else (outcome, ())
    return ChunkOutput(token, None, (TokenLogprobs(0, 0.0),) * num_targets, pooled, forced)


def _failure(code: str) -> RequestFailed:
    error = error_from_code(code, "recorded")
    return error if isinstance(error, RequestFailed) else RequestFailed("recorded")


def _request(value: Line) -> Request:
    sampling = value["sampling"]
    pooling, adapter = value.get("pooling"), value.get("adapter")  # records of older versions have none
    bias = tuple((token, by) for token, by in sampling["logit_bias"])
    return Request(
        **value
        | {
            "prompt": np.array(value["prompt"], np.int64),
            "sampling": SamplingParams(**sampling | {"logit_bias": bias}),
            "stop_token_ids": frozenset(value["stop_token_ids"]),
            "pooling": None if pooling is None else Pooling(pooling),
            "adapter": None if adapter is None else Adapter(*adapter),
        }
    )

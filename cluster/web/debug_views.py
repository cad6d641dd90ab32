"""An engine's view as plain JSON values: `/debug/kv` and `/debug/plan` of one worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from planner.account import account_for
from planner.limits import Limits
from worker.inspection import EngineView, StepRecord

View = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RollCall:
    """What the workers said that answered, and the ids of those that did not in time."""

    views: list[View]
    silent: list[str]


Inspect = Callable[[int], Awaitable[RollCall]]
"""Asks every worker for its view, with so many of its last steps explained. Raises `Unavailable`."""


async def nobody(_num_steps: int) -> RollCall:
    """Where there are no workers to ask."""
    return RollCall([], [])


def worker_view(worker_id: str, view: EngineView, num_steps: int) -> View:
    """Both parts; `num_steps` of the last steps are explained."""
    steps = view.steps[len(view.steps) - min(num_steps, len(view.steps)) :]
    return {
        "worker": worker_id,
        "kv": _plain(asdict(view.holds.pool)),
        "num_sequences": view.holds.num_sequences,
        "sequences": _plain([asdict(sequence) for sequence in view.holds.sequences]),
        "limits": _limits(view.limits),
        "steps": [_step(record, view.limits) for record in steps],
    }


def _step(record: StepRecord, limits: Limits) -> View:
    before = record.before
    return {
        **asdict(account_for(record.step, limits)),
        "seconds": record.seconds,
        "num_running_before": before.num_running,
        "num_waiting_before": before.num_waiting,
    }


def _limits(limits: Limits) -> View:
    names = ("max_prefill_tokens", "min_prefill_tokens", "max_num_seqs", "max_batched_tokens", "prefill_chunk_tokens")
    return {name: getattr(limits, name) for name in names} | {"widths": list(limits.widths)}


def _plain(value: Any) -> Any:
    """Enums by their values, all the way down."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

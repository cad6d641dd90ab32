"""A look into a running engine, taken between two of its turns: what it holds, and what its last steps were."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from planner.inspection import Inspection
from planner.limits import Limits, Snapshot
from planner.step import Step

NUM_STEPS_KEPT: Final = 64


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that was run. `before` is the state before it was committed; `seconds` as in `worker.stats`."""

    step: Step
    seconds: float
    before: Snapshot


@dataclass(frozen=True, slots=True)
class EngineView:
    """`steps` are the last ones, the newest last. Immutable: it may be read on any thread."""

    limits: Limits
    snapshot: Snapshot
    holds: Inspection
    steps: tuple[StepRecord, ...]

"""Where a benchmark says that the time of a step went, of a step that is told where to spend it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from benchmarks.mask_times import mask_times
from benchmarks.step_times import StepTimes, TimedMasks
from planner.step import Step
from tests.grammar_rig import TEXT, schema_grammar
from tests.ladder_masks import ForcingMasks, LadderMasks
from worker.masks import ConstrainedRow

STEP = Step(1, (), (), ())
ROW = ConstrainedRow(1, "3", np.zeros(0, dtype=np.int64))


class SlowMasks(LadderMasks):
    def masks(self, rows: Any) -> Any:
        time.sleep(0.03)
        return super().masks(rows)


class Launching:
    """The part of an executor that launches: takes so many seconds before it asks for masks, if it does, and after."""

    def __init__(self, before_s: float, masks: TimedMasks | None, after_s: float) -> None:
        self._before_s, self._masks, self._after_s = before_s, masks, after_s

    def launch(self, step: Step) -> None:
        time.sleep(self._before_s)
        if self._masks is not None:
            self._masks.masks([ROW])
        time.sleep(self._after_s)


def test_a_step_with_masks_is_told_in_three_parts_and_one_without_in_one() -> None:
    times = StepTimes(on_gpu=False)
    masks = TimedMasks(SlowMasks(203), times)
    launching: Any = Launching(0.06, masks, 0.0)
    times.launch(launching, STEP)
    parts = {part: percentiles[0] for part, percentiles in times.take().items()}
    assert parts.keys() == {"wait", "masks", "draws"}
    assert parts["wait"] >= 60
    assert parts["masks"] >= 30
    launching = Launching(0.01, None, 0.01)
    times.launch(launching, STEP)
    with times.timing("plan"):
        time.sleep(0.02)
    parts = {part: percentiles[0] for part, percentiles in times.take().items()}
    assert parts.keys() == {"launch", "plan"}
    assert min(parts.values()) >= 20
    assert times.take() == {}


def test_what_is_forced_is_timed_and_may_be_left_out() -> None:
    times = StepTimes(on_gpu=False)
    masks = TimedMasks(ForcingMasks(203, "##."), times)
    assert masks.forced([ROW]) == [(0, 1)]
    assert times.take().keys() == {"forced"}
    masks.forces = False
    assert masks.forced([ROW]) == [()]
    assert times.take() == {}


@pytest.mark.parametrize("num_steps", [5, 400])
def test_masks_are_timed_until_all_answers_have_ended(num_steps: int) -> None:
    grammar = schema_grammar({"enum": ["abc", "abd"]})
    told = mask_times(TEXT.vocabulary(), [grammar] * 3, num_steps)
    assert told.keys() == {"clock_ms", "threads_ms", "forced"}
    assert all(0 < each < 10_000 for each in told["clock_ms"])
    assert 0.4 < told["forced"] < 1

"""The benchmark of the host's part of a step: it measures what it says."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from benchmarks.host_step import CASES, LIMITS, PHASES, PhaseClock, report_times, step_times


@pytest.mark.parametrize("case", CASES)
def test_every_phase_of_a_step_has_its_time(case: str) -> None:
    limits, stop_token_ids = CASES[case]
    times = step_times(limits, stop_token_ids, 2)
    assert set(times) == {*PHASES, "sum"}
    assert all(each > 0 for each in times.values())


def test_more_rows_take_more_of_the_phases_that_go_through_them() -> None:
    few, many = (step_times(replace(LIMITS, capacity=100_000), frozenset(), rows) for rows in (1, 64))
    assert all(many[phase] > few[phase] for phase in ("plan", "commit", "note"))


def test_a_report_is_read_by_all_its_readers() -> None:
    assert all(each > 0 for each in report_times(3).values())


def test_time_belongs_to_the_innermost_phase() -> None:
    clock = PhaseClock()
    clock.enter("plan")
    before = clock.enter("executor")
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass
    clock.enter(before)
    clock.end_step()
    (step,) = clock.steps
    assert before == "plan"
    assert step["executor"] >= 0.01 > step["plan"]

"""How many workers there should be: what they report, what is decided by it, and which settings contradict."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.commands.serve import add_arguments
from cluster.config import ServiceConfig, service_config
from cluster.serving.scaling import load_report
from cluster.serving.scaling_policy import CELL_USE, QUEUE_S, SEAT_USE, LoadPolicy
from planner.errors import InvalidConfiguration
from planner.limits import Snapshot

POLICY = LoadPolicy(target_use=0.8, target_queue_s=2.0)


@dataclass
class Context:
    """What the policy reads of Serve's."""

    running_replicas: list[str]
    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)


def wanted(*reports: dict[str, float] | None, target: int | None = None) -> int:
    """For workers that reported so; None: not yet."""
    names = [f"w{number}" for number in range(len(reports))]
    metrics: dict[str, dict[str, float]] = {}
    for name, told in zip(names, reports, strict=True):
        for metric, value in (told or {}).items():
            metrics.setdefault(metric, {})[name] = value
    context: Any = Context(names, len(names) if target is None else target, metrics)
    number, state = POLICY(context)
    assert state == {}
    return number


def report(cells: float = 0.0, seats: float = 0.0, queue_s: float = 0.0) -> dict[str, float]:
    return {CELL_USE: cells, SEAT_USE: seats, QUEUE_S: queue_s}


def snapshot(**changes: Any) -> Snapshot:
    idle = {"capacity": 1000, "free_cells": 1000, "owned_cells": 0, "cached_cells": 0}
    idle |= {"num_running": 0, "num_waiting": 0, "queued_prefill_tokens": 0, "step": 0}
    return Snapshot(**(idle | changes))


@pytest.mark.parametrize(
    ("told", "number"),
    [
        (report(), 1),
        (report(cells=0.8), 1),
        (report(cells=0.81), 2),
        (report(seats=2.4), 3),
        (report(queue_s=7.0), 4),
        (report(cells=0.4, seats=1.6, queue_s=2.0), 2),
    ],
)
def test_the_fullest_of_cells_seats_and_queue_decides(told: dict[str, float], number: int) -> None:
    assert wanted(told) == number


def test_loads_of_all_workers_add_up() -> None:
    assert wanted(report(cells=0.2), report(seats=0.2), report(queue_s=0.5)) == 1
    assert wanted(report(cells=0.8), report(seats=0.8), report(queue_s=2.1)) == 4


def test_nothing_is_taken_away_while_a_worker_has_not_reported() -> None:
    assert wanted(report(), None, report()) == 3
    assert wanted(report(seats=4.0), None) == 5
    assert wanted(target=2) == 2


def test_a_worker_reports_what_its_queue_will_own_and_what_it_takes() -> None:
    busy = snapshot(owned_cells=300, num_running=6, num_waiting=10, queued_prefill_tokens=500, queue_tokens_per_s=250.0)
    assert load_report(busy, 8) == report(cells=0.8, seats=2.0, queue_s=2.0)


def test_cells_that_are_only_cached_are_no_load() -> None:
    assert load_report(snapshot(cached_cells=900, free_cells=100), 8) == report()


def settings(**changes: Any) -> ServiceConfig:
    return service_config({"engine": {"model": "m"}, **changes})


def test_a_fleet_that_scales_begins_with_the_fewest_unless_told() -> None:
    assert settings(min_workers=2, max_workers=5).num_workers == 2
    assert settings(max_workers=5).num_workers == 1
    assert settings(min_workers=2, num_workers=3, max_workers=5).num_workers == 3
    assert settings(num_workers=3).most_workers == 3
    assert settings(max_workers=5).most_workers == 5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"min_workers": 2}, "min_workers is 2 and max_workers is not given"),
        ({"min_workers": 3, "max_workers": 2}, r"min_workers \(3\) <= num_workers \(3\) <= max_workers \(2\)"),
        ({"num_workers": 3, "max_workers": 2}, r"min_workers \(1\) <= num_workers \(3\) <= max_workers \(2\)"),
        ({"min_workers": 2, "num_workers": 1, "max_workers": 2}, r"\(2\) <= num_workers \(1\)"),
        ({"max_workers": 2, "scaling": {"look_back_s": 5}}, r"report_interval_s \(10\) must be below .* \(5\)"),
        ({"max_workers": 2, "scaling": {"target": 5}}, r"scaling\.target: unknown setting"),
    ],
)
def test_bounds_that_contradict_are_refused_with_the_numbers(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfiguration, match=reason):
        settings(**changes)


def test_the_command_has_flags_for_the_bounds() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["m", "--min-workers", "2", "--max-workers", "4"])
    assert (args.min_workers, args.num_workers, args.max_workers) == (2, None, 4)

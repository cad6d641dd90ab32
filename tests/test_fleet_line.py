"""What the terminal is told of a fleet that grows, shrinks and loses workers."""

from __future__ import annotations

import pytest

from cluster.commands.fleet_line import LastTold, fleet_line
from cluster.config import service_config


@pytest.mark.parametrize(
    ("workers", "told"),
    [
        ({}, "workers ready 0/2"),
        ({"STARTING": 2}, "workers ready 0/2"),
        ({"RUNNING": 2}, "workers ready 2/2"),
        ({"RUNNING": 1, "STARTING": 1}, "workers ready 1/2"),  # one was lost, or is exchanged
        ({"RUNNING": 1, "STOPPING": 1}, "workers ready 1/2"),
        ({"RUNNING": 2, "STARTING": 1}, "workers ready 2/3"),  # the load asks for one more
        ({"RUNNING": 3, "STOPPING": 1}, "workers ready 3/3"),
    ],
)
def test_workers_are_told_beside_those_that_are_wanted(workers: dict[str, int], told: str) -> None:
    config = service_config({"engine": {"model": "m"}, "num_workers": 2})
    assert fleet_line([workers], {"RUNNING": 1}, config) == f"{told}, gateways ready 1/1"


def test_a_line_is_told_once_and_again_only_where_somebody_waits_for_the_next() -> None:
    told = LastTold()
    assert [told.is_news("0/2", at, again_s=20) for at in (0.0, 1.0, 19.9, 20.0, 21.0)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert told.is_news("1/2", 21.5, again_s=20)
    assert [told.is_news(line, at) for line, at in (("1/2", 1e6), ("2/2", 1e6), ("2/2", 1e9))] == [False, True, False]


def test_workers_of_all_models_count_together() -> None:
    models = [{"engine": {"model": "a"}, "num_workers": 2}, {"engine": {"model": "b"}}]
    config = service_config({"models": models, "num_gateways": 2})
    told = fleet_line([{"RUNNING": 2}, {"STARTING": 1}], {"RUNNING": 1}, config)
    assert told == "workers ready 2/3, gateways ready 1/2"

"""How the soak judges, and one of its rounds in short; the whole of it is `benchmarks.soak`."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cluster_state import cluster_state
from benchmarks.slopes import Growth, Series
from benchmarks.soak import BARS, RAY_BARS, Pace, Soak, verdict
from benchmarks.storm_service import WORKER, StormedService

PACE = Pace(requests_per_s=10, storm_s=4, rounds_to_worker=1, rounds_to_gateway=100)


def series(*counts: float) -> Series:
    made = Series()
    for minute, count in enumerate(counts):
        made.add(minute, count)
    return made


def test_a_leak_has_a_slope_and_noise_has_none() -> None:
    chance = random.Random(1)
    noise = [chance.uniform(-3, 3) for _ in range(20)]
    leak = series(*(100 + minute + more for minute, more in enumerate(noise)))
    still = series(*(100 + more for more in noise))
    assert leak.per_minute() == pytest.approx(1.0, abs=0.3)
    assert still.per_minute() == pytest.approx(0.0, abs=0.3)


def test_one_bad_moment_and_the_warm_up_change_nothing() -> None:
    assert series(5, 5, 5, 900, 5, 5, 5).per_minute() == 0
    assert series(0, 40, 80, 90, 90, 90, 90, 90, 90).per_minute(warm_up_minutes=3) == 0
    assert series(1, 2, 3, 4, 5).per_minute() is None


@given(st.lists(st.integers(0, 1000), min_size=6, max_size=12))
def test_what_never_grows_never_fails(counts: list[int]) -> None:
    slope = series(*sorted(counts, reverse=True)).per_minute()
    assert slope is not None
    assert slope <= 0


def test_growth_is_judged_where_it_is_fastest() -> None:
    growth = Growth()
    for minute in range(6):
        growth.add(minute, {("threads", "a"): 7, ("threads", "b"): 7 + 2 * minute, ("tasks", "a"): 5 - minute})
    growth.add(6, {("threads", "newcomer"): 900})
    assert growth.steepest(warm_up_minutes=0) == {"threads": 2, "tasks": -1}


@pytest.mark.cluster
@pytest.mark.timeout(200)
async def test_a_round_of_clients_who_leave_and_a_killed_worker_leaves_nothing_behind(
    stormed_service: StormedService,
) -> None:
    with cluster_state(stormed_service.process.ray_address()) as state:
        soak = Soak(stormed_service.process, state, PACE, seed=2)
        await soak.round()
    found = verdict(soak, warm_up_minutes=0)
    assert found["killed_workers"] == soak.num_killed[WORKER] == 1
    assert sum(found["clients"].values()) == 40
    assert len(found["clients"]) == 4
    assert (found["errors"], found["wrong_answers"], found["cells_lost"]) == ([], [], [])
    assert found["samples"].keys() == BARS.keys() | RAY_BARS.keys()
    assert not found["met"]["all_measured"], "one round says nothing of growth"

"""Requests that all come at once, through gateways that share nothing: both workers get as much to do."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.even_work import PACES, Burst, Knowledge, requests_of

SEEDS = range(4)


def busier_shares(num_gateways: int, knowledge: Knowledge) -> list[float]:
    """Of the answers' tokens; even is 0.5."""
    requests = requests_of(2, 256)
    return [
        Burst(requests, 2, num_gateways, PACES[seed % len(PACES)], knowledge, seed).run(until_placed=True).busier_share
        for seed in SEEDS
    ]


@pytest.mark.parametrize("num_gateways", [1, 4])
def test_two_workers_get_as_much_to_draw(num_gateways: int) -> None:
    assert max(busier_shares(num_gateways, Knowledge())) < 0.513


def test_that_takes_knowing_what_waits_in_inboxes() -> None:
    assert max(busier_shares(4, Knowledge(inboxes=False))) > 0.55


def test_that_takes_knowing_how_long_answers_will_be() -> None:
    assert fmean(busier_shares(1, Knowledge(answers=False))) > fmean(busier_shares(1, Knowledge())) + 0.002


def test_small_burst_runs_to_its_end() -> None:
    split = Burst(requests_of(2, 4), 2, 2, PACES[0], Knowledge(), 0).run()
    assert sum(split.requests) == 8
    assert split.last_s > 1000 * 0.004

"""The failover storm in short: a service with three workers and two gateways, a fake executor, and few blows.

The whole of it, with a real model, is `benchmarks.failover_storm`.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.failover_storm import Disturbance, disturbed, storm_on
from benchmarks.storm_answers import Answer, Road, the_asks
from benchmarks.storm_service import StormedService


async def storm(stormed: StormedService, disturbance: Disturbance, *roads: Road) -> dict[str, Any]:
    asks = the_asks(24, least_tokens=20, most_tokens=80, roads=roads)
    blows = {"num_kills": 3, "num_freezes": 0, "outage_s": 0.0, "seed": 3}
    async with storm_on(stormed.process, stormed.secret, model=stormed.model, asks=asks, **blows) as made:
        figures = await disturbed(made, disturbance)
    print(figures)  # seen where a test fails
    return figures


@pytest.mark.cluster
@pytest.mark.timeout(300)
async def test_three_killed_workers_change_no_answer_over_http_or_grpc(stormed_service: StormedService) -> None:
    figures = await storm(stormed_service, Disturbance.KILL, *Road)
    assert figures["differing"] == []
    assert figures["same_as_undisturbed"] == 24
    assert figures["struck"] == 3
    assert sum(figures["sequences_on_each"]) > 3, "nothing ran on those that were killed"


@pytest.mark.cluster
@pytest.mark.timeout(300)
async def test_a_killed_gateway_hurts_its_own_clients_and_frees_their_cells(
    stormed_service: StormedService,
) -> None:
    figures = await storm(stormed_service, Disturbance.GATEWAY, *Road)
    assert figures["differing"] == []
    assert 0 < figures["clients_with_an_error"] < 24
    assert figures["clients_with_an_error"] + figures["same_as_undisturbed"] == 24
    assert figures["told_within_s"] < 5
    assert figures["freed_within_s"] < 3


@pytest.mark.cluster
@pytest.mark.timeout(300)
async def test_wires_that_are_dead_for_a_while_change_no_answer(stormed_service: StormedService) -> None:
    figures = await storm(stormed_service, Disturbance.LINK, Road.HTTP)
    assert figures["differing"] == []
    assert figures["cut"] == 2
    assert all(0 < seconds < 30 for seconds in figures["freed_within_s"])


def test_an_answer_that_lost_or_repeated_anything_is_told_from_the_right_one() -> None:
    def answer(*tokens: int, logprob: float = -1.0, reasons: tuple[str, ...] = ("stop",)) -> Answer:
        made = Answer(usage=(3, len(tokens)))
        made.texts[0] = "".join(map(str, tokens))
        made.tokens[0] = list(tokens)
        made.logprobs[0] = [logprob] * len(tokens)
        made.endings[0] = list(reasons)
        return made

    right = answer(1, 2, 3)
    assert answer(1, 2, 3, logprob=-1.000001).differences(right) == []
    for wrong in (
        answer(1, 2),
        answer(1, 2, 2, 3),
        answer(1, 2, 4),
        answer(1, 2, 3, logprob=-1.1),
        answer(1, 2, 3, reasons=("stop", "stop")),
        answer(1, 2, 3, reasons=()),
        Answer(error="gone"),
    ):
        assert wrong.differences(right)

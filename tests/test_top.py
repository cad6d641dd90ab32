"""`raycomb top` draws what a gateway tells, and says in one line what keeps it from that."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.cli import main
from cluster.commands.top import table
from cluster.telemetry.fleet_view import fleet_view
from tests.fake_fleet import FakeFleet
from tests.fleet_reports import reports
from tests.http_desk import MODEL, TEXT, desk, says
from tests.listening import listening


def fleet_at(at: float, tokens: int) -> Any:
    busy, idle = reports()
    grown = replace(busy, totals=replace(busy.totals, tokens_generated=tokens))
    service = Service(FakeFleet(MODEL, says("x"), reports=(grown, idle)), TEXT, ApiSettings())
    service.meter.events.note("w1 joined")
    return fleet_view([service]) | {"at": at}


def test_each_worker_has_a_line_with_its_rate_and_its_cells() -> None:
    lines = table(fleet_at(102.0, 150), fleet_at(100.0, 50)).splitlines()
    assert lines[0].startswith("tiny  ready  50.0 tokens/s  0 open")
    busy, idle = (next(line for line in lines if line.startswith(name)) for name in ("w1", "w2"))
    assert busy.split()[:6] == ["w1", "ready", "3", "1", "50.0", "40"]
    assert "[######++++++............] of 100" in busy
    assert idle.split()[:4] == ["w2", "draining", "0", "0"]
    assert lines[-1].endswith("w1 joined")


def test_workers_of_several_models_tell_whose_they_are() -> None:
    busy, idle = reports()
    services = [
        Service(FakeFleet(replace(MODEL, name=name), says("x"), reports=(report,)), TEXT, ApiSettings())
        for name, report in (("small", busy), ("large", idle))
    ]
    lines = table(fleet_view(services), fleet_view(services)).splitlines()
    assert lines[0].startswith("small, large  ")
    assert [line.split()[-1] for line in lines[2:5]] == ["MODEL", "small", "large"]
    assert len({line.rindex(line.split()[-1]) for line in lines[2:5]}) == 1


def test_a_worker_that_has_just_come_has_no_rate_yet() -> None:
    before = fleet_at(100.0, 50) | {"workers": []}
    assert (
        next(line for line in table(fleet_at(101.0, 60), before).splitlines() if line.startswith("w1")).split()[4]
        == "-"
    )


async def test_the_command_looks_at_a_service_once(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = FakeFleet(MODEL, says("x"), reports=reports())
    async with desk(fleet=fleet, api_keys=("k",)) as d, listening(d.app) as url:
        look = ["top", "--url", url, "--once", "--interval", "0.1"]
        assert await asyncio.to_thread(main, [*look, "--api-key", "k"]) == 0
        assert "w1" in capsys.readouterr().out
        assert await asyncio.to_thread(main, look) == 2
        assert "answered 401: give --api-key" in capsys.readouterr().err


def test_no_service_is_one_line_of_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9", "--once"]) == 2
    assert "does not answer" in capsys.readouterr().err

"""`/debug/kv` and `/debug/plan` tell what workers say of themselves, and nothing to strangers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.models import single
from cluster.telemetry.events import MAX_EVENTS, Events
from cluster.web.api import create_app
from cluster.web.debug_views import RollCall, View, worker_view
from planner.errors import Unavailable
from tests.engine_bench import running
from tests.fake_fleet import FakeFleet
from tests.fakes import FakeExecutor, fake_info, fake_request
from tests.fleet_reports import reports
from tests.http_desk import MODEL, TEXT, refusal, says


def real_view(num_steps: int) -> View:
    """Of an engine that has three sequences running in a pool of 4096 cells."""
    executor = FakeExecutor(fake_info(num_cells=4096))
    with running(executor, max_num_seqs=4) as bench:
        executor.hold()
        for key in range(3):
            bench.client.submit(key, fake_request(range(1, 30 + key), 20, tenant="acme"))
        executor.release(5)
        executor.wait_launched(6)
        asked = bench.engine.inspect()
        executor.release(1)
        return worker_view("w1", asked.result(10), num_steps)


@asynccontextmanager
async def client(*, alive: bool = True, key: str = "") -> AsyncIterator[httpx.AsyncClient]:
    async def inspect(num_steps: int) -> RollCall:
        if not alive:
            raise Unavailable("no worker could be asked what it holds: TimeoutError")
        return RollCall([real_view(num_steps)], ["w2"])

    settings = ApiSettings(api_keys=(key,) if key else ())
    service = Service(FakeFleet(MODEL, says("x")), TEXT, settings, inspect=inspect)
    transport = httpx.ASGITransport(app=create_app(single(service)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield http


async def test_the_cells_of_each_owner_and_the_others_make_the_pool() -> None:
    async with client() as http:
        (worker,) = (await http.get("/debug/kv")).json()["workers"]
    pool = worker["kv"]
    assert worker["worker"] == "w1"
    assert pool["free"] + pool["owned"] + pool["cached"] == pool["capacity"] == 4096
    assert pool["adds_up"] is True
    assert sum(sequence["num_cells"] for sequence in worker["sequences"]) == pool["referenced"]
    assert len(worker["sequences"]) == worker["num_sequences"] == 3
    assert {sequence["tenant"] for sequence in worker["sequences"]} == {"acme"}
    assert sum(span["num_bins"] for span in pool["map"]) * pool["cells_per_bin"] == 4096
    assert "steps" not in worker


async def test_the_last_steps_are_told_with_their_reasons() -> None:
    async with client() as http:
        (worker,) = (await http.get("/debug/plan", params={"steps": 2})).json()["workers"]
    assert [step["number"] for step in worker["steps"]] == [5, 6]
    last = worker["steps"][-1]
    assert last["slices"][0]["why"].startswith("lone decodes: 4 is the narrowest decode width that holds 3")
    assert last["slices"][0]["num_padded"] == 1
    assert last["num_running_before"] == 3
    assert worker["limits"]["widths"][0] == 1
    assert "prompt" not in json.dumps(worker["limits"])


async def test_a_number_of_steps_that_is_none_is_refused() -> None:
    async with client() as http:
        for steps in ("-1", "x", "65", "9" * 30, "1.5", "\u0661"):
            assert refusal(await http.get("/debug/plan", params={"steps": steps}))["param"] == "steps"


async def test_a_worker_that_says_nothing_is_named_beside_what_the_others_say() -> None:
    async with client() as http:
        for path in ("/debug/kv", "/debug/plan"):
            told = (await http.get(path)).json()
            assert ([worker["worker"] for worker in told["workers"]], told["silent"]) == (["w1"], ["w2"])


async def test_where_no_worker_can_be_asked_it_is_a_503() -> None:
    async with client(alive=False) as http:
        refusal(await http.get("/debug/kv"), 503)


async def test_the_fleet_is_told_without_asking_workers() -> None:
    service = Service(FakeFleet(MODEL, says("x"), reports=reports()), TEXT, ApiSettings(served_model_names=("m",)))
    service.meter.events.note("w1 joined")
    transport = httpx.ASGITransport(app=create_app(single(service)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        await http.post("/v1/completions", json={"prompt": "hello", "temperature": -1})
        fleet = (await http.get("/debug/fleet")).json()
    assert (fleet["model"], fleet["ready"]) == ("m", True)
    assert [(worker["worker"], worker["draining"]) for worker in fleet["workers"]] == [("w1", False), ("w2", True)]
    assert (fleet["workers"][0]["num_running"], fleet["workers"][0]["prefix_hits"]) == (3, 4)
    assert fleet["gateway"]["num_refused"] == 1
    assert [event["text"] for event in fleet["events"]] == ["w1 joined"]


async def test_only_the_last_events_are_kept() -> None:
    events = Events()
    for number in range(MAX_EVENTS + 5):
        events.note(str(number))
    assert [event.text for event in events.all] == [str(number) for number in range(5, MAX_EVENTS + 5)]


async def test_strangers_are_told_nothing() -> None:
    async with client(key="k") as http:
        for path in ("/debug/kv", "/debug/plan", "/debug/fleet"):
            refusal(await http.get(path), 401)
            assert (await http.get(path, headers={"authorization": "Bearer k"})).status_code == 200

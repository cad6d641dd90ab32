"""Adapters over HTTP: a request names one, the list of models has them, and an admin loads and unloads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from planner.request import Adapter
from tests.adapter_rig import AdaptedFleet
from tests.fake_fleet import FakeFleet
from tests.http_desk import CHAT, MODEL, PROMPT, desk, refusal, says

PIRATE, POET = Adapter("pirate", 7), Adapter("poet", 8)
ADMIN = {"authorization": "Bearer the admin"}


def fleet(**adapters: Adapter) -> FakeFleet:
    return FakeFleet(MODEL, says("hi there"), adapters=dict(adapters))


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_a_request_gets_the_adapter_that_it_names(path: str, body: dict[str, Any]) -> None:
    async with desk(fleet=fleet(pirate=PIRATE, poet=POET)) as d:
        for name, adapter in (("poet", POET), ("pirate", PIRATE), ("tiny", None), (None, None)):
            answer = await d.post(path, **body, model=name)
            assert answer.json()["model"] == (name or "tiny")
            assert d.fleet.requests[-1].adapter == adapter
        events = await d.events(path, **body, model="poet")
        assert events[0]["model"] == "poet"
        assert d.fleet.requests[-1].adapter == POET


async def test_every_endpoint_that_asks_workers_takes_an_adapter() -> None:
    async with desk(fleet=fleet(poet=POET)) as d:
        assert (await d.post("/v1/embeddings", input="a", model="poet")).json()["model"] == "poet"
        assert (await d.post("/v1/responses", input="a", model="poet")).json()["model"] == "poet"
        session = (await d.post("/v1/sessions", model="poet")).json()["id"]
        await d.post("/v1/completions", **PROMPT, model="poet", session_id=session)
        await d.post("/v1/completions", **PROMPT, model="poet", use_beam_search=True, n=2, temperature=0)
        assert {request.adapter for request in d.fleet.requests} == {POET}
        assert (await d.post("/tokenize", prompt="a", model="poet")).status_code == 200
        assert (await d.post("/detokenize", tokens=[1], model="poet")).status_code == 200


async def test_the_list_of_models_names_the_parent_of_an_adapter() -> None:
    async with desk(fleet=fleet(poet=POET), served_model_names=("tiny", "alias")) as d:
        cards = (await d.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("alias", None), ("poet", "tiny")]
        assert (await d.http.get("/v1/models/poet")).json()["parent"] == "tiny"
        error = refusal(await d.http.get("/v1/models/pirate"), 404)
        assert "there is: tiny, alias, poet" in error["message"]


@dataclass
class AdminDesk:
    http: httpx.AsyncClient
    fleet: FakeFleet
    workers: AdaptedFleet

    async def load(self, name: str, path: str, headers: dict[str, str] = ADMIN) -> httpx.Response:
        body = {"lora_name": name, "lora_path": path}
        return await self.http.post("/v1/load_lora_adapter", json=body, headers=headers)

    async def unload(self, name: str) -> httpx.Response:
        return await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)

    async def wanted(self) -> list[str]:
        return list(await self.workers.catalogue.wanted())


@asynccontextmanager
async def admin_desk(allowed: Path, **settings: Any) -> AsyncIterator[AdminDesk]:
    workers = AdaptedFleet(fleet(), {"named": "/at the start"})
    await workers.sync()
    adapters = workers.desk(str(allowed), {"tiny"})
    async with desk(fleet=workers.fleet, adapters=adapters, admin_keys=("the admin",), **settings) as d:
        yield AdminDesk(d.http, workers.fleet, workers)


async def test_an_adapter_is_loaded_used_and_unloaded_at_run_time(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        loaded = await d.load("poet", "poems/best")
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        assert (await d.workers.catalogue.wanted())["poet"].folder == str((tmp_path / "poems/best").resolve())
        answer = await d.http.post("/v1/completions", json=PROMPT | {"model": "poet"})
        assert answer.json()["model"] == "poet"
        gone = await d.unload("poet")
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'poet' removed successfully.")
        refusal(await d.http.post("/v1/completions", json=PROMPT | {"model": "poet"}), 404)


async def test_what_was_named_at_the_start_can_be_unloaded_and_loaded_again(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        assert (await d.unload("named")).status_code == 200
        assert "named" not in d.fleet.adapters
        assert (await d.load("named", "elsewhere")).status_code == 200


async def test_a_worker_that_cannot_load_it_says_why_and_nothing_stays(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        d.workers.failures["poet"] = "q_proj has rank 64, and max_lora_rank is 16"
        error = refusal(await d.load("poet", "poet"))
        assert error["param"] == "lora_path"
        assert "rank 64" in error["message"]
        assert await d.wanted() == ["named"]


async def test_workers_that_cannot_be_reached_leave_nothing_behind(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        d.workers.is_reachable = False
        refusal(await d.load("poet", "poet"), 503)
        assert await d.wanted() == ["named"]
        d.workers.is_reachable, d.fleet.ready = True, False
        refusal(await d.load("poet", "poet"), 503)


async def test_an_unload_that_workers_have_not_followed_yet_says_so_and_holds(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        d.workers.is_reachable = False
        error = refusal(await d.unload("named"), 503)
        assert "not every worker has let go of it yet" in error["message"]
        assert await d.wanted() == []
        assert refusal(await d.unload("named"), 404)["param"] == "lora_name"


async def test_an_unload_needs_no_word_from_workers_that_follow_by_themselves(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        d.workers.is_reachable = False
        unloading = asyncio.create_task(d.unload("named"))
        await asyncio.sleep(0.1)
        d.fleet.adapters = {}
        assert (await unloading).status_code == 200


@pytest.mark.parametrize(
    ("name", "path", "param", "words"),
    [
        ("tiny", "x", "lora_name", "the name of a model"),
        ("named", "x", "lora_name", "loaded already"),
        ("", "x", "lora_name", "1 to 128"),
        ("new\nline", "x", "lora_name", "printable"),
        ("x" * 129, "x", "lora_name", "1 to 128"),
        ("poet", "../secret", "lora_path", "from below"),
        ("poet", "/etc", "lora_path", "from below"),
    ],
)
async def test_a_wrong_name_or_path_is_refused(tmp_path: Path, name: str, path: str, param: str, words: str) -> None:
    async with admin_desk(tmp_path) as d:
        error = refusal(await d.load(name, path))
        assert error["param"] == param
        assert words in error["message"]
        assert await d.wanted() == ["named"]


async def test_unloading_what_is_not_there_is_a_404(tmp_path: Path) -> None:
    async with admin_desk(tmp_path) as d:
        assert refusal(await d.unload("ghost"), 404)["param"] == "lora_name"


@pytest.mark.parametrize("keys", [(), ("a client",)])
async def test_only_an_admins_key_loads_adapters(tmp_path: Path, keys: tuple[str, ...]) -> None:
    async with admin_desk(tmp_path, api_keys=keys) as d:
        for headers in ({}, {"authorization": "Bearer a client"}, {"authorization": "Basic the admin"}):
            refusal(await d.load("poet", "poet", headers), 401)
        assert (await d.load("poet", "poet")).status_code == 200
        asked = await d.http.post("/v1/completions", json=PROMPT)
        assert asked.status_code == (401 if keys else 200)
        assert (await d.http.post("/v1/completions", json=PROMPT, headers=ADMIN)).status_code == 200


async def test_a_service_that_does_not_allow_it_says_so(tmp_path: Path) -> None:
    body = {"lora_name": "poet", "lora_path": "poet"}
    async with desk(admin_keys=("the admin",)) as d:
        error = refusal(await d.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN))
        assert "without lora_folder" in error["message"]
    async with desk() as d:
        refusal(await d.http.post("/v1/load_lora_adapter", json=body), 401)


async def test_the_span_of_a_request_names_the_adapter() -> None:
    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    async with desk(fleet=fleet(poet=POET), tracer=provider.get_tracer("tests")) as d:
        for name in ("poet", "tiny"):
            await d.post("/v1/chat/completions", **CHAT, model=name)
    told = [dict(span.attributes or {})["gen_ai.request.model"] for span in kept.get_finished_spans()]
    assert told == ["poet", "tiny"]

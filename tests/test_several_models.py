"""Several models of one service: how they are told, and that each request finds the one that it names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.answers.maker import AnswerMaker, Service
from cluster.api_settings import ApiSettings
from cluster.cli import serve_parser
from cluster.commands.serve import make_plan
from cluster.commands.settings_sources import merged_tokens
from cluster.config import ServiceConfig, decide_device, service_config
from cluster.models import Models
from cluster.web.api import create_app
from planner.errors import InvalidConfiguration
from planner.request import Adapter
from tests.adapter_rig import AdaptedFleet
from tests.fake_fleet import FakeFleet
from tests.http_desk import CHAT, MODEL, PROMPT, TEXT, refusal, says
from tests.ports import own_ports
from tests.service_process import tiny_checkpoint

ADMIN = {"authorization": "Bearer admin"}


@dataclass
class TwoModels:
    """A service of `small` and `large` (also called `big`), of which `large` has an adapter."""

    http: httpx.AsyncClient
    small: FakeFleet
    large: FakeFleet

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)


@asynccontextmanager
async def two_models(allowed: str = "/adapters") -> AsyncIterator[TwoModels]:
    small = FakeFleet(replace(MODEL, name="small"), says("small"))
    large = FakeFleet(replace(MODEL, name="large", context=32), says("large"))
    adapted = AdaptedFleet(large, {"poet": "/adapters/poet"})
    await adapted.sync()
    shared = {"admin_keys": ("admin",)}
    makers = [
        AnswerMaker(Service(small, TEXT, ApiSettings(**shared), model_name="small")),
        AnswerMaker(
            Service(
                large,
                TEXT,
                ApiSettings(served_model_names=("large", "big"), **shared),
                model_name="large",
                adapters=adapted.desk(allowed, {"large", "big"}),
            )
        ),
    ]
    transport = httpx.ASGITransport(app=create_app(Models(makers)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield TwoModels(http, small, large)


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_a_request_goes_to_the_model_that_it_names(path: str, body: dict[str, Any]) -> None:
    async with two_models() as service:
        for asked, name in (("small", "small"), ("large", "large"), ("big", "big"), (None, "small"), ("poet", "poet")):
            answer = (await service.post(path, **body, model=asked)).json()
            assert answer["model"] == name
            said = answer["choices"][0]
            assert (said.get("text") or said["message"]["content"]).endswith("small" if name == "small" else "large")
        assert service.large.requests[-1].adapter == Adapter("poet", 1)
        error = refusal(await service.post(path, **body, model="other"), 404)
        assert error["message"].endswith("there is: small, large, big, poet")
        assert (len(service.small.requests), len(service.large.requests)) == (2, 3)


async def test_every_other_endpoint_finds_its_model_too() -> None:
    async with two_models() as service:
        assert (await service.post("/v1/embeddings", input="a", model="large")).json()["model"] == "large"
        assert (await service.post("/v1/responses", input="a", model="large")).json()["model"] == "large"
        assert (await service.post("/tokenize", prompt="a", model="large")).json()["max_model_len"] == 32
        assert (await service.post("/detokenize", tokens=[5], model="large")).status_code == 200
        assert len(service.large.requests) == 2
        assert service.small.requests == []
        cards = (await service.http.get("/v1/models")).json()["data"]
        assert [(card["id"], card["parent"], card["max_model_len"]) for card in cards] == [
            ("small", None, 64),
            ("large", None, 32),
            ("big", None, 32),
            ("poet", "large", 32),
        ]
        assert (await service.http.get("/v1/models/large")).json()["id"] == "large"
        refusal(await service.http.get("/v1/models/other"), 404)


async def test_a_session_is_of_one_model() -> None:
    async with two_models() as service:
        opened = (await service.post("/v1/sessions", model="large")).json()
        assert opened["model"] == "large"
        other = (await service.post("/v1/sessions")).json()
        assert other["model"] == "small"
        told = (await service.post("/v1/completions", **PROMPT, session_id=opened["id"])).json()
        assert told["model"] == "large"
        refusal(await service.post("/v1/completions", **PROMPT, session_id=opened["id"], model="small"), 404)
        forked = (await service.post(f"/v1/sessions/{opened['id']}/fork")).json()
        assert forked["model"] == "large"
        listed = (await service.http.get("/v1/sessions")).json()["data"]
        assert {each["id"] for each in listed} == {opened["id"], other["id"], forked["id"]}
        assert (await service.http.delete(f"/v1/sessions/{opened['id']}")).status_code == 200
        refusal(await service.http.get(f"/v1/sessions/{opened['id']}"), 404)


async def test_the_service_is_ready_when_every_model_has_a_worker() -> None:
    async with two_models() as service:
        assert (await service.http.get("/ready")).status_code == 200
        service.large.ready = False
        assert (await service.http.get("/ready")).status_code == 503
        assert (await service.http.get("/health")).status_code == 200
        service.large.model = None
        assert (await service.http.get("/health")).status_code == 503
        listed = (await service.http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["small"]
        refusal(await service.post("/v1/completions", **PROMPT, model="large"), 503)
        assert (await service.post("/v1/completions", **PROMPT, model="small")).status_code == 200


async def test_metrics_have_the_model_as_a_label() -> None:
    async with two_models() as service:
        for _ in range(2):
            await service.post("/v1/completions", **PROMPT, model="large")
        await service.post("/v1/completions", **PROMPT, model="small")
        await service.post("/v1/completions", **PROMPT, model="large", temperature=-1)
        page = (await service.http.get("/metrics")).text
        lines = [line for line in page.splitlines() if line.startswith("raycomb_generation_tokens_total{")]
        told = {line.split('model_name="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
        assert told == {"small": 5, "large": 12}
        fleet = (await service.http.get("/debug/fleet")).json()
        assert (fleet["model"], fleet["models"]) == ("small", ["small", "large"])


async def test_an_adapter_is_loaded_for_the_model_that_is_named(tmp_path: Path) -> None:
    async with two_models(str(tmp_path)) as service:

        async def load(**body: str) -> httpx.Response:
            return await service.http.post("/v1/load_lora_adapter", json=body, headers=ADMIN)

        assert (await load(lora_name="bard", lora_path="bard", base_model_name="big")).status_code == 200
        assert (await service.post("/v1/completions", **PROMPT, model="bard")).status_code == 200
        refusal(await load(lora_name="x", lora_path="x", base_model_name="other"), 404)
        assert "without lora_folder" in refusal(await load(lora_name="x", lora_path="x"))["message"]
        taken = refusal(await load(lora_name="small", lora_path="x", base_model_name="large"))
        assert taken["param"] == "lora_name"
        unload = {"lora_name": "bard"}
        assert (await service.http.post("/v1/unload_lora_adapter", json=unload, headers=ADMIN)).status_code == 200
        refusal(await service.post("/v1/completions", **PROMPT, model="bard"), 404)


# How they are told.


def planned(*tokens: str) -> ServiceConfig:
    parser = serve_parser()
    return make_plan(parser.parse_args(merged_tokens(parser, [*tokens, "--port", str(own_ports(1)[0])], {}))).service


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        tiny_checkpoint(tmp_path / name)
    return {name: str(tmp_path / name) for name in ("a", "b")}


def test_models_named_one_after_the_other_share_what_flags_say(folders: dict[str, str]) -> None:
    config = planned(folders["a"], folders["b"], "--executor", "tests.served_fake:make_executor", "--max-num-seqs", "5")
    first, second = config.each
    assert (first.model_name, second.model_name) == ("a", "b")
    assert (first.engine.max_num_seqs, second.engine.max_num_seqs) == (5, 5)
    assert first.executor == second.executor == "tests.served_fake:make_executor"
    assert first.secret == second.secret
    assert first.others == second.others == ()


def test_a_file_says_for_each_model_what_flags_say_for_all(folders: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"""
executor: tests.served_fake:make_executor
max-num-seqs: 6
models:
  - model: {folders["a"]}
    served-model-name: [small, tiny]
    num-workers: 2
  - model: {folders["b"]}
    served_model_name: large
    max_num_seqs: 3
    min_workers: 2
    max_workers: 4
""")
    first, second = planned("--config", str(file)).each
    assert first.http.served_model_names == ("small", "tiny")
    assert second.http.served_model_names == ("large",)
    assert (first.engine.max_num_seqs, second.engine.max_num_seqs) == (6, 3)
    assert (first.num_workers, second.num_workers, second.min_workers, second.max_workers) == (2, 2, 2, 4)


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ("[]", "which model?"),
        ("{}", "must be a list"),
        ("[{}]", "models[0]: which model?"),
        ("[{model: m, odd: 1}]", "models[0]: unknown setting 'odd'"),
        ("[{model: m, max_cells: 0}]", "--max-cells must be greater than or equal to 1, not 0"),
    ],
)
def test_a_list_of_models_that_is_wrong_is_refused(tmp_path: Path, models: str, words: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"models: {models}\n")
    with pytest.raises(InvalidConfiguration) as told:
        planned("--config", str(file))
    assert words in told.value.message


def test_a_flag_that_cannot_mean_two_models_is_refused(folders: dict[str, str]) -> None:
    with pytest.raises(InvalidConfiguration, match="--served-model-name cannot mean 2 models"):
        planned(folders["a"], folders["b"], "--served-model-name", "x")
    with pytest.raises(InvalidConfiguration, match="two models go by the name 'a'"):
        planned(folders["a"], folders["a"], "--executor", "tests.served_fake:make_executor")


def test_a_serve_yaml_lists_models_instead_of_an_engine() -> None:
    config = service_config(
        {
            "models": [
                {"engine": {"model": "a"}, "served_model_names": ["x"], "num_workers": 3},
                {"engine": {"model": "b", "device": "cpu"}, "min_workers": 2, "max_workers": 3},
            ],
            "http": {"api_keys": ["k"]},
            "num_gateways": 2,
        }
    )
    first, second = config.each
    assert (first.model_name, first.num_workers, first.num_gateways) == ("x", 3, 2)
    assert (second.model_name, second.num_workers, second.max_workers) == ("b", 2, 3)
    assert first.http.api_keys == second.http.api_keys
    assert config.on("cuda").each[0].engine.device == "cuda"
    assert config.on("cuda").each[1].engine.device == "cpu"
    with pytest.raises(InvalidConfiguration, match="3 workers need a GPU each and the cluster has 2"):
        decide_device(config, {"GPU": 2})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"models": [{"engine": {"model": "a"}}], "engine": {"model": "b"}}, "engine is given beside models"),
        ({"models": []}, "at least one model"),
        ({"models": [{"engine": {"model": "a"}, "http": {}}]}, "models[0]: unknown setting 'http'"),
        ({"models": [{"engine": {"model": "a"}}, {"engine": {"model": "a"}}]}, "two models go by the name 'a'"),
        (
            {"models": [{"engine": {"model": "a"}}, {"engine": {"model": "b"}, "min_workers": 2}]},
            "max_workers is not given",
        ),
        (
            {"models": [{"engine": {"model": "a"}}, {"engine": {"model": "b"}, "lora_modules": {"x": "/x"}}]},
            "enable_lora is not",
        ),
        ({"models": [{"engine": {"model": "a"}}, {"engine": {"model": "b"}, "odd": 1}]}, "others.0.odd"),
    ],
)
def test_settings_of_several_models_that_contradict_each_other_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidConfiguration) as told:
        service_config(settings)
    assert words in told.value.message

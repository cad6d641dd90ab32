"""A real service of two models, one of them with adapters, through the loss of every worker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

from planner.request import Adapter, Request, SamplingParams
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.fake_slots import save_fake_adapter
from tests.fakes import expected_tokens
from tests.service_process import ServiceProcess, running_service, tiny_checkpoint, wait_until
from tests.tiny_text import tiny_text

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(290)]

WORKER = "ServeReplica:raycomb:Worker"
OTHER = f"{WORKER}-2"
ADMIN = {"authorization": "Bearer admin"}
REVISIONS = {"pirate": 5, "poet": 6}
TEXT = tiny_text()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("adapted")
    for name, revision in REVISIONS.items():
        save_fake_adapter(folder / "adapters" / name, revision)
    (folder / "tiny").mkdir()
    checkpoint = str(tiny_checkpoint(folder / "tiny"))
    adapted = {"enable_lora": True, "max_loras": 2, "lora_modules": {"pirate": f"{folder}/adapters/pirate"}}
    adapted |= {"lora_folder": f"{folder}/adapters", "num_workers": 2}
    models = [
        {"model": checkpoint, "served_model_name": "tiny", **adapted},
        {"model": checkpoint, "served_model_name": "other", "max_model_len": 100},
    ]
    settings = {"models": models, "executor": "tests.served_fake:make_executor", "device": "cpu", "host": "127.0.0.1"}
    (folder / "config.yaml").write_text(json.dumps(settings))
    with running_service(
        "--config", f"{folder}/config.yaml", "--admin-key", "admin", "--drain-timeout-s", "5"
    ) as process:
        process.wait_for_line("ready at", 180)
        yield process
        process.end(60)


def answer(service: ServiceProcess, model: str, prompt: str, max_tokens: int) -> httpx.Response:
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    return httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)


def tokens(told: httpx.Response) -> tuple[int, ...]:
    assert told.status_code == 200, told.text
    return tuple(told.json()["choices"][0]["token_ids"])


def expected(model: str, prompt: str, max_tokens: int) -> tuple[int, ...]:
    adapter = Adapter(model, REVISIONS[model]) if model in REVISIONS else None
    ids = np.array(TEXT.encode(prompt), np.int64)
    request = Request(ids, max_tokens, SamplingParams(temperature=0.0), adapter=adapter)
    return expected_tokens(request, vocab_size=TEXT.vocab_size)


def admin(service: ServiceProcess, verb: str, **body: str) -> httpx.Response:
    return httpx.post(f"{service.url}/v1/{verb}_lora_adapter", json=body, headers=ADMIN, timeout=60)


def models(service: ServiceProcess) -> dict[str, str | None]:
    cards = httpx.get(f"{service.url}/v1/models", timeout=10).json()["data"]
    return {card["id"]: card["parent"] for card in cards}


def workers(service: ServiceProcess, model: str) -> list[dict[str, Any]]:
    fleet = httpx.get(f"{service.url}/debug/fleet", timeout=10).json()
    return [worker for worker in fleet["workers"] if worker["model"] == model]


def test_adapters_outlive_every_worker_that_had_them(service: ServiceProcess) -> None:
    assert models(service) == {"tiny": None, "pirate": "tiny", "other": None}
    assert tokens(answer(service, "pirate", "hello", 8)) == expected("pirate", "hello", 8)
    assert tokens(answer(service, "tiny", "hello", 8)) == expected("tiny", "hello", 8)
    assert answer(service, "poet", "hello", 8).status_code == 404

    refused = admin(service, "load", lora_name="ghost", lora_path="ghost")
    assert refused.status_code == 400, refused.text
    assert "no adapter" in refused.json()["error"]["message"]
    assert admin(service, "load", lora_name="poet", lora_path="poet").status_code == 200
    assert models(service) == {"tiny": None, "pirate": "tiny", "poet": "tiny", "other": None}

    asked = [(name, f"hello {number}") for number in range(4) for name in ("tiny", "pirate", "poet")]
    with ThreadPoolExecutor(len(asked)) as clients:
        first, second = [each for each in service.processes(WORKER) if OTHER not in " ".join(each.cmdline())]
        answers = begin(service, clients, asked)
        first.send_signal(signal.SIGKILL)
        finish(answers, asked)
        wait_until(lambda: len(workers(service, "tiny")) == 2, 60, "another worker is there")
        answers = begin(service, clients, asked)
        second.send_signal(signal.SIGKILL)  # the only one that was told of the poet while it ran
        finish(answers, asked)

        running = clients.submit(answer, service, "poet", "hello", 60)
        wait_until(lambda: num_running(service) > 0, 10, "it runs")
        assert admin(service, "unload", lora_name="poet").status_code == 200
        assert answer(service, "poet", "hello", 8).status_code == 404
        assert tokens(running.result()) == expected("poet", "hello", 60)
    assert models(service) == {"tiny": None, "pirate": "tiny", "other": None}
    assert admin(service, "unload", lora_name="poet").status_code == 404


def num_running(service: ServiceProcess) -> int:
    return sum(worker["num_running"] for worker in workers(service, "tiny"))


def begin(
    service: ServiceProcess, clients: ThreadPoolExecutor, asked: list[tuple[str, str]]
) -> list[Future[httpx.Response]]:
    """Answers of a second or two, of which at least one is under way."""
    answers = [clients.submit(answer, service, name, prompt, 60) for name, prompt in asked]
    wait_until(lambda: num_running(service) > 4, 10, "they run")
    return answers


def finish(answers: list[Future[httpx.Response]], asked: list[tuple[str, str]]) -> None:
    for told, (name, prompt) in zip(answers, asked, strict=True):
        assert tokens(told.result()) == expected(name, prompt, 60)


def test_each_model_has_workers_of_its_own_behind_the_same_gateways(service: ServiceProcess) -> None:
    assert tokens(answer(service, "other", "hello", 8)) == expected("other", "hello", 8)
    too_long = answer(service, "other", "hello", 100)
    assert "maximum context length is 100 tokens" in too_long.json()["error"]["message"]
    assert answer(service, "third", "hello", 8).status_code == 404
    with grpc.insecure_channel(f"127.0.0.1:{service.grpc_port}") as channel:
        stub = pb_grpc.InferenceStub(channel)
        listed = stub.ListModels(pb.ListModelsRequest(), timeout=10)
        assert [(model.name, model.context) for model in listed.models][-1] == ("other", 100)
        request = pb.TokenizeRequest(model="other", text="hello")
        assert list(stub.Tokenize(request, timeout=10).token_ids) == TEXT.encode("hello")

    (worker,) = service.processes(OTHER)
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(answer, service, "other", "hello", 60)
        wait_until(lambda: workers(service, "other")[0]["num_running"] > 0, 10, "it runs")
        worker.send_signal(signal.SIGKILL)
        wait_until(lambda: not is_ready(service), 10, "a model is without a worker")
        assert tokens(answer(service, "tiny", "hello", 8)) == expected("tiny", "hello", 8)
        assert tokens(running.result()) == expected("other", "hello", 60)  # at the one that replaced it
    wait_until(lambda: is_ready(service), 10, "every model has a worker")
    page = httpx.get(f"{service.url}/metrics", timeout=10).text
    lines = [line for line in page.splitlines() if line.startswith("raycomb_workers{") and 'state="ready"' in line]
    told = {line.split('model_name="')[1].split('"')[0]: float(line.split()[-1]) for line in lines}
    assert told == {"tiny": 2, "other": 1}


def is_ready(service: ServiceProcess) -> bool:
    return httpx.get(f"{service.url}/ready", timeout=10).status_code == 200

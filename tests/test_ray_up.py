"""`ray up` with the files of deploy/ on hosts of a test's own, and what their service does when hosts are lost.

One story, told in the order of this file: the cluster is made once.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import httpx
import pytest

from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.lan import Host, Lan, lan, why_no_hosts
from tests.ray_up_rig import CLUSTER, DOCTOR_S, RayUp, make_keys
from tests.service_process import wait_until
from tests.sse_events import events_of

OBSTACLE: Final = why_no_hosts()
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.model,
    pytest.mark.timeout(1100),
    pytest.mark.skipif(OBSTACLE is not None, reason=OBSTACLE or ""),
]

UP: Final = f"ray up -y {CLUSTER}"
WORKER: Final = "ServeReplica:raycomb:Worker"
PATIENCE_S: Final = 480.0
TOO_SLOW: Final = ("timed out during startup", "update-failed")
"""What Ray says of a head, and of other hosts, where a machine is so busy that its processes take longer than 30 s. One
does it again, then."""
NUM_TOKENS: Final = 128
PROMPTS: Final = ("The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time,", "Water boils at")


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Lan]:
    with lan(tmp_path_factory.mktemp("disks"), [Path(sys.prefix), Path(sys.base_prefix), smollm2_path]) as made:
        yield made


@pytest.fixture(scope="module")
def at_the_desk(network: Lan, tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> RayUp:
    """Before anything has been done."""
    keys = tmp_path_factory.mktemp("keys") / "ssh"
    make_keys(keys)
    made = RayUp(network, keys, smollm2_path)
    network.start(made.desk)
    return made


@pytest.fixture(scope="module")
def cluster(network: Lan, at_the_desk: RayUp) -> RayUp:
    """After `ray up`."""
    for host in (at_the_desk.head, *at_the_desk.workers):
        network.start(host)
    code, printed = at_the_desk.try_at_desk(UP, PATIENCE_S)
    if code != 0:
        told = f"{printed}\n{at_the_desk.autoscaler_log()}"
        assert any(words in told for words in TOO_SLOW), told
        at_the_desk.at_desk(UP, PATIENCE_S)
    return at_the_desk


@pytest.fixture(scope="module")
def service(cluster: RayUp) -> RayUp:
    """After `serve deploy`, with both workers ready."""
    cluster.on_head("RAY_AUTH_MODE=disabled serve deploy raycomb/deploy/serve.yaml", PATIENCE_S)
    wait_until(lambda: cluster.application_status() == "RUNNING", PATIENCE_S, "all workers and gateways are ready")
    return cluster


def is_ready(host: Host) -> bool:
    try:
        return httpx.get(f"http://{host.address}:8000/ready", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def hosts_with_worker(service: RayUp) -> list[Host]:
    return [host for host in (service.head, *service.workers) if host.is_on and host.processes(WORKER)]


class Clients:
    """Four outside, who stream from one host's front at once, the last by gRPC. `follow` is called at each piece of
    text with the number of characters that the slowest has."""

    def __init__(self, host: Host, follow: Callable[[int], None] = lambda _: None) -> None:
        self._host, self._follow = host, follow
        self._texts = [""] * len(PROMPTS)
        self._heard_at: dict[int, float] = {}
        self.longest_pause_s = 0.0
        """Between two pieces of one stream."""

    async def ask(self) -> list[str]:
        """The texts."""
        async with httpx.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            *http, last = range(len(PROMPTS))
            await asyncio.gather(*(self._by_http(client, number) for number in http), self._by_grpc(last))
        return self._texts

    def _take(self, number: int, piece: str) -> None:
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - self._heard_at.get(number, now))
        self._heard_at[number] = now
        self._texts[number] += piece
        self._follow(min(map(len, self._texts)))

    async def _by_http(self, client: httpx.AsyncClient, number: int) -> None:
        body = self._body(number) | {"model": "smollm2-135m", "stream": True}
        async with client.stream("POST", f"http://{self._host.address}:8000/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for event in events_of(response):
                assert "error" not in event, event
                self._take(number, event["choices"][0]["text"])

    async def _by_grpc(self, number: int) -> None:
        options = [("grpc.enable_http_proxy", 0)]
        async with grpc.aio.insecure_channel(f"{self._host.address}:9000", options=options) as channel:
            stub = pb_grpc.InferenceStub(channel)
            async for message in stub.Generate(pb.GenerateRequest(**self._body(number)), timeout=PATIENCE_S):
                for choice in message.choices:
                    self._take(number, choice.text)

    def _body(self, number: int) -> dict[str, Any]:
        return {
            "prompt": PROMPTS[number],
            "max_tokens": NUM_TOKENS,
            "temperature": 0.7 * (number % 2),
            "seed": number,
            "ignore_eos": True,
        }


@pytest.fixture(scope="module")
def undisturbed(service: RayUp) -> list[str]:
    """The right texts."""
    return asyncio.run(Clients(service.head).ask())


def test_clients_outside_are_answered_by_http_and_grpc(undisturbed: list[str]) -> None:
    assert all(len(text) > NUM_TOKENS // 2 for text in undisturbed)  # some tokens are half a character


def test_every_host_with_a_worker_lets_clients_in(service: RayUp) -> None:
    hosts = hosts_with_worker(service)
    assert hosts
    wait_until(lambda: all(map(is_ready, hosts)), PATIENCE_S, "each lets clients in")


async def test_streams_go_on_when_a_cable_is_cut_and_another_host_dies(
    network: Lan, service: RayUp, undisturbed: list[str]
) -> None:
    """For a while no worker may be left, until Serve has made one on the head."""
    cut_off = next(host for host in hosts_with_worker(service) if host is not service.head)
    (dying,) = [worker for worker in service.workers if worker is not cut_off]
    engines = cut_off.processes(WORKER)

    def cut() -> None:
        for engine in engines:
            engine.suspend()  # no engine is so fast that its answers are over before the cable is out
        network.cut(cut_off)
        for engine in engines:
            engine.resume()

    disturbances: list[tuple[int, Callable[[], None]]] = [(10, cut), (40, dying.kill)]

    def disturb(num_characters: int) -> None:
        if disturbances and num_characters >= disturbances[0][0]:
            disturbances.pop(0)[1]()

    clients = Clients(service.head, disturb)
    async with asyncio.timeout(PATIENCE_S):
        texts = await clients.ask()
    assert not disturbances
    assert clients.longest_pause_s > 1, "all answers of the hosts that were lost were over before"
    assert texts == undisturbed


def test_hosts_that_come_back_join_again(network: Lan, service: RayUp, undisturbed: list[str]) -> None:
    for host in service.workers:
        if host.is_on:
            network.mend(host)
        else:
            network.start(host)
    doctor = "raycomb doctor --cluster ~/ray_bootstrap_config.yaml --wait 90"
    doctor += " --url http://127.0.0.1:8000 --grpc-target 127.0.0.1:9000"
    printed = service.on_head(f"RAY_ADDRESS=auto RAY_AUTH_MODE=disabled {doctor}", PATIENCE_S)
    assert all(worker.address in printed for worker in service.workers)
    assert "ok   answer: http://127.0.0.1:8000 generates" in printed
    assert asyncio.run(Clients(service.head).ask()) == undisturbed


def test_ray_down_ends_it_everywhere(service: RayUp) -> None:
    service.at_desk(f"ray down -y {CLUSTER}", PATIENCE_S)
    wait_until(lambda: not any(service.processes("raylet/raylet").values()), PATIENCE_S, "no raylet is left")


def test_a_ray_up_that_finds_only_the_head_fails_and_says_who_is_missing(service: RayUp) -> None:
    for worker in service.workers:
        worker.kill()
    service.fill_in(CLUSTER, {f"--wait {DOCTOR_S}": "--wait 2"})
    code, printed = service.try_at_desk(UP, PATIENCE_S)
    assert code != 0
    (line,) = [line for line in printed.splitlines() if line.startswith("FAIL")]
    one, two = (worker.address for worker in service.workers)
    assert line.startswith(f"FAIL nodes: 1 of 3: {service.head.address}; missing {one}, {two} -> ")

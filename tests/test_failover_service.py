"""Failover of the real service with a real model: workers are killed and frozen mid-answer, and no client can tell."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.storm_answers import SAME_LOGPROB, STARTS
from tests.service_process import ServiceProcess, wait_until
from tests.service_state import state_of
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.model, pytest.mark.timeout(700)]

WORKER = "ServeReplica:raycomb:Worker"
PATIENCE_S = 250.0
KILLED_WITHIN_S = 150.0
"""Three health checks of 10 s, the service's time to drain and 5 s, and the raylet's patience: 45 s."""


def the_requests() -> list[dict[str, Any]]:
    """Twelve requests with one right answer each, although a step of other batch mates rounds logits otherwise."""
    requests: list[dict[str, Any]] = []
    for number in range(12):
        body: dict[str, Any] = {
            "model": "smollm2-135m",
            "prompt": STARTS[number % len(STARTS)],
            "max_tokens": 24 + 4 * number,
            "temperature": [0.0, 0.7, 1.0][number % 3],
            "n": 1 + number % 3,
            "seed": 100 + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body |= {"logprobs": 2} if number % 4 in (1, 2) else {}
        body |= {"presence_penalty": 0.8, "repetition_penalty": 1.2} if number % 5 == 3 else {}
        body |= {"echo": True} if number % 6 == 5 else {}
        body |= {"stop": [" the", "\n\n\n"], "min_tokens": 3} if number % 6 == 4 else {}
        requests.append(body)
    return requests


@dataclass
class Answer:
    """All that a client was told, put together by choice."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    tokens: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: dict[int, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    best: dict[int, list[dict[str, float] | None]] = field(default_factory=lambda: defaultdict(list))
    endings: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    usage: dict[str, int] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        if event.get("usage"):
            self.usage = {name: event["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        for choice in event["choices"]:
            index = choice["index"]
            self.texts[index] += choice["text"]
            if choice["finish_reason"] is not None:
                self.endings[index].append(choice["finish_reason"])
            if (scores := choice.get("logprobs")) is not None:
                self.tokens[index] += scores["tokens"]
                self.offsets[index] += scores["text_offset"]
                self.logprobs[index] += scores["token_logprobs"]
                self.best[index] += scores["top_logprobs"] or []

    def check_same(self, undisturbed: Answer) -> None:
        assert dict(self.texts) == dict(undisturbed.texts)
        assert dict(self.tokens) == dict(undisturbed.tokens)
        assert dict(self.offsets) == dict(undisturbed.offsets)
        assert dict(self.endings) == dict(undisturbed.endings)
        assert all(len(ending) == 1 for ending in self.endings.values())
        assert self.usage == undisturbed.usage
        for index, logprobs in undisturbed.logprobs.items():
            for mine, theirs in zip(self.logprobs[index], logprobs, strict=True):
                assert mine == pytest.approx(theirs, abs=SAME_LOGPROB)
            for own, other in zip(self.best[index], undisturbed.best[index], strict=True):
                assert own == (None if other is None else pytest.approx(other, abs=SAME_LOGPROB))


class Clients:
    """Everybody who asks, at once. `disturb` is called with the number of events so far, all answers together."""

    def __init__(self, service: ServiceProcess, api_key: str, disturb: Callable[[int], None] = lambda _: None) -> None:
        headers = {"authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(base_url=service.url, headers=headers, timeout=PATIENCE_S, trust_env=False)
        self._disturb = disturb
        self.num_events = 0

    async def ask_all(self) -> list[Answer]:
        async with self._client:
            return await asyncio.gather(*map(self._ask, the_requests()))

    async def _ask(self, body: dict[str, Any]) -> Answer:
        answer = Answer()
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for event in events_of(response):
                answer.take(event)
                self.num_events += 1
                self._disturb(self.num_events)
        return answer


@pytest.fixture(scope="module")
def undisturbed(smollm2_service: ServiceProcess, api_key: str) -> tuple[list[Answer], int]:
    """The right answers, and the number of events in which they came."""
    clients = Clients(smollm2_service, api_key)
    return asyncio.run(clients.ask_all()), clients.num_events


def two_workers(service: ServiceProcess) -> list[psutil.Process]:
    """Both workers, once both serve."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        wait_until(lambda: len(service.processes(WORKER)) == 2, PATIENCE_S, "two processes of workers")
        with state_of(service.ray_address()) as state:
            try:
                if len(state.ask()["workers"]) == 2:
                    return service.processes(WORKER)
            except AssertionError:
                continue  # one that it asked was gone
    raise AssertionError("no two workers serve")


async def test_killed_workers_change_no_answer(
    smollm2_service: ServiceProcess, api_key: str, undisturbed: tuple[list[Answer], int]
) -> None:
    """The second is killed while the first is being replaced: for a while there is no worker at all."""
    answers, num_events = undisturbed
    chance = random.Random(4)
    victims = await asyncio.to_thread(two_workers, smollm2_service)
    moments = [chance.randint(1, num_events // 3), chance.randint(num_events // 3, num_events // 2)]

    def disturb(event: int) -> None:
        if moments and event >= moments[0]:
            del moments[0]
            victims.pop().kill()

    disturbed = await asyncio.wait_for(Clients(smollm2_service, api_key, disturb).ask_all(), PATIENCE_S)
    assert not victims
    for mine, theirs in zip(disturbed, answers, strict=True):
        mine.check_same(theirs)
    await asyncio.to_thread(two_workers, smollm2_service)


async def test_a_frozen_worker_changes_no_answer_and_is_killed(
    smollm2_service: ServiceProcess, api_key: str, undisturbed: tuple[list[Answer], int]
) -> None:
    answers, num_events = undisturbed
    moment = random.Random(5).randint(1, num_events // 3)
    frozen = (await asyncio.to_thread(two_workers, smollm2_service))[0]

    def disturb(event: int) -> None:
        if event == moment:
            frozen.send_signal(signal.SIGSTOP)

    try:
        disturbed = await asyncio.wait_for(Clients(smollm2_service, api_key, disturb).ask_all(), PATIENCE_S)
        await asyncio.to_thread(frozen.wait, KILLED_WITHIN_S)
    finally:
        if frozen.is_running():
            frozen.send_signal(signal.SIGCONT)
    for mine, theirs in zip(disturbed, answers, strict=True):
        mine.check_same(theirs)
    await asyncio.to_thread(two_workers, smollm2_service)

"""Sessions over HTTP while workers are killed: every history is as a model says that knows no worker.

Two applications share a keeper of sessions over gRPC; each act comes to one of them by chance."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.models import single
from cluster.web.api import create_app
from planner.request import SamplingParams
from tests.company import Company
from tests.fakes import expected_tokens, fake_info, fake_request
from tests.http_desk import TEXT
from tests.session_rig import keeper

VOCAB = TEXT.vocab_size
CONTEXT = 1024
VERBS = ("extend", "extend", "extend together", "fork", "rewind", "close", "kill", "extend and kill")


@dataclass
class Known:
    """What the model knows of a session."""

    tokens: list[int] = field(default_factory=list)
    has_pending: bool = False

    @property
    def position(self) -> int:
        return len(self.tokens) - self.has_pending


class Life:
    """Two gateways' applications over a company, and the model beside them."""

    def __init__(self, company: Company, gateways: Sequence[httpx.AsyncClient], chance: random.Random) -> None:
        self.company = company
        self.gateways = gateways
        self.chance = chance
        self.known: dict[str, Known] = {}
        self.num_kills = 0

    async def ask(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.chance.choice(self.gateways).request(method, path, json=body or None)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        return told

    async def open(self) -> None:
        self.known[(await self.ask("POST", "/v1/sessions"))["id"]] = Known()

    async def extend(self, session: str) -> None:
        known = self.known[session]
        delta = [self.chance.randrange(VOCAB) for _ in range(self.chance.randrange(1, 20))]
        budget, seed = self.chance.randrange(1, 24), self.chance.randrange(2**32)
        told = await self.ask(
            *("POST", "/v1/completions"),
            prompt=delta, session_id=session, max_tokens=budget, seed=seed, ignore_eos=True, return_token_ids=True,
        )  # fmt: skip
        (choice,) = told["choices"]
        prompt = [*known.tokens, *delta]
        asked = fake_request(prompt, budget, sampling=SamplingParams(seed=seed))
        assert choice["prompt_token_ids"] == prompt
        assert tuple(choice["token_ids"]) == expected_tokens(asked, vocab_size=VOCAB)
        self.known[session] = Known([*prompt, *choice["token_ids"]], has_pending=True)

    async def fork(self, session: str, at: int | None) -> None:
        known = self.known[session]
        made = (await self.ask("POST", f"/v1/sessions/{session}/fork", **({} if at is None else {"at": at})))["id"]
        whole = Known(list(known.tokens), known.has_pending)
        self.known[made] = whole if at is None else Known(known.tokens[:at])

    async def kill(self) -> None:
        self.num_kills += 1
        await self.company.replace(self.chance.choice(self.company.workers), killed=True)

    async def kill_soon(self) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, 0.05))
        await self.kill()

    async def act(self, verb: str) -> None:
        session = self.chance.choice(list(self.known))
        match verb:
            case "extend":
                await self.extend(session)
            case "extend together":
                await asyncio.gather(*(self.extend(one) for one in list(self.known)[:4]))
            case "fork":
                await self.fork(session, None)
            case "rewind":
                await self.fork(session, self.chance.randint(0, self.known[session].position))
            case "close" if len(self.known) > 1:
                assert (await self.ask("DELETE", f"/v1/sessions/{session}"))["deleted"] is True
                del self.known[session]
            case "kill":
                await self.kill()
            case "extend and kill":
                await asyncio.gather(self.extend(session), self.kill_soon())

    async def check(self) -> None:
        listed = (await self.ask("GET", "/v1/sessions"))["data"]
        told = {one["id"]: (one["position"], one["has_pending"], one["state"]) for one in listed}
        assert told == {name: (known.position, known.has_pending, "idle") for name, known in self.known.items()}


async def live(verbs: list[str], seed: int) -> Life:
    company = Company(2, max_failovers=50, info=fake_info(vocab_size=VOCAB, context=CONTEXT))
    await company.start()
    try:
        async with keeper() as kept, AsyncExitStack() as stack:
            gateways = []
            for _ in range(2):
                models = single(Service(company.streams, TEXT, ApiSettings(), sessions=kept.owner()))
                stack.push_async_callback(models.first.shut)
                transport = httpx.ASGITransport(app=create_app(models))
                gateway = httpx.AsyncClient(transport=transport, base_url="http://gateway")
                gateways.append(await stack.enter_async_context(gateway))
            life = Life(company, gateways, random.Random(seed))
            await life.open()
            for verb in verbs:
                await life.act(verb)
            await life.check()
            return life
    finally:
        await company.close()


@settings(max_examples=12)
@given(verbs=st.lists(st.sampled_from(VERBS), min_size=3, max_size=14), seed=st.integers(0, 2**32))
def test_histories_are_as_a_naive_model_says_whatever_is_killed(verbs: list[str], seed: int) -> None:
    asyncio.run(live(verbs, seed))


@pytest.mark.parametrize("seed", range(2))
def test_a_long_life_with_many_kills(seed: int) -> None:
    chance = random.Random(seed)
    life = asyncio.run(live([chance.choice(VERBS) for _ in range(50)], seed))
    assert life.num_kills >= 5
    assert max(known.position for known in life.known.values()) > 40

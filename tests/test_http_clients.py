"""Real clients over a real socket: the OpenAI SDK, and connections that break."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from planner.errors import QueueFull
from planner.request import Request
from tests.fake_fleet import FakeFleet, FakeGeneration
from tests.http_desk import MODEL, desk, says, until


@asynccontextmanager
async def served(fleet: FakeFleet, **settings: Any) -> AsyncIterator[str]:
    """The application behind uvicorn on a free port of this machine; gives its base URL."""
    async with desk(fleet=fleet, **settings) as d:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            server = uvicorn.Server(uvicorn.Config(d.app, log_level="warning", lifespan="off", ws="none"))
            serving = asyncio.create_task(server.serve(sockets=[bound]))
            try:
                await until(lambda: server.started)
                yield f"http://127.0.0.1:{bound.getsockname()[1]}"
            finally:
                server.should_exit = True
                await serving


@asynccontextmanager
async def sdk(base_url: str, key: str = "none", max_retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=max_retries, http_client=http) as client,
    ):
        yield client


async def test_the_openai_sdk_reads_answers_streams_models_and_errors() -> None:
    fleet = FakeFleet(MODEL, says("hello wörld"))
    async with served(fleet, api_keys=("key",)) as url, sdk(url, "key") as client:
        chat = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=2
        )
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = await client.completions.create(model="tiny", prompt="hi", max_tokens=30, logprobs=1)
        models = await client.models.list()
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt="hi", temperature=-1)
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")
    assert chat.choices[0].message.content == "hello wörld"
    assert chat.choices[0].logprobs is not None
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello wörld"
    assert chunks[-1].usage is not None
    assert text.choices[0].text == "hello wörld"
    assert [model.id for model in models.data] == ["tiny"]
    assert caught.value.param == "temperature"


class NarrowFleet(FakeFleet):
    """Takes two sequences at a time, and asks others to come again in `later_s`."""

    num_refused, later_s = 0, 1.2

    def submit(self, request: Request) -> FakeGeneration:
        if self.num_running == 2:
            self.num_refused += 1
            raise QueueFull("two are running", retry_after_s=self.later_s)
        return super().submit(request)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_burst_over_a_full_queue_waits_as_long_as_it_is_told_and_succeeds(stream: bool) -> None:
    fleet = NarrowFleet(MODEL, says("hello"), gate=asyncio.Event())
    clock = asyncio.get_running_loop().time

    async def ask(client: openai.AsyncOpenAI) -> float:
        answer = await client.completions.create(model="tiny", prompt="hi", max_tokens=30, stream=stream)
        if isinstance(answer, openai.AsyncStream):
            text = "".join([choice.text async for chunk in answer for choice in chunk.choices])
        else:
            text = answer.choices[0].text
        assert text == "hello"
        return clock()

    async with served(fleet) as url, sdk(url, max_retries=2) as client:
        began = clock()
        asking = [asyncio.create_task(ask(client)) for _ in range(4)]
        await until(lambda: fleet.num_refused == 2)
        fleet.gate.set()
        took = sorted([ended - began for ended in await asyncio.gather(*asking)])
    assert took[1] < fleet.later_s
    assert took[2] >= 2, "Retry-After is in whole seconds, and not less than was meant"
    assert fleet.num_refused == 2, "nobody came before its time"


async def test_who_never_finds_room_is_told_so_after_its_retries() -> None:
    fleet = NarrowFleet(MODEL, says("a" * 60, ends=False), gate=asyncio.Event())
    fleet.later_s = 0.5
    async with served(fleet) as url, sdk(url) as patient, sdk(url, max_retries=1) as client:
        running = [asyncio.create_task(patient.completions.create(model="tiny", prompt="hi")) for _ in range(2)]
        await until(lambda: fleet.num_running == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="tiny", prompt="hi")
        assert caught.value.response.headers["retry-after"] == "1"
        assert fleet.num_refused == 2
        for task in running:
            task.cancel()


async def test_a_wrong_key_is_an_authentication_error() -> None:
    async with served(FakeFleet(MODEL, says("x")), api_keys=("key",)) as url, sdk(url, "other") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_closed_socket_frees_every_sequence(stream: bool, n: int) -> None:
    fleet = FakeFleet(MODEL, says("a" * 60, ends=False), gate=asyncio.Event())
    async with served(fleet) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"prompt": "x", "max_tokens": 50, "n": n, "stream": stream}
        asking = asyncio.create_task(http.post(f"{url}/v1/completions", json=body))
        await until(lambda: fleet.num_running == n)
        asking.cancel()
        await until(lambda: fleet.num_running == 0)
    assert fleet.generations[0].cancelled == set(range(n))


async def test_a_stream_left_in_the_middle_frees_its_sequences() -> None:
    fleet = FakeFleet(MODEL, says("a" * 60, ends=False))
    async with served(fleet) as url, httpx.AsyncClient(trust_env=False) as http:
        body = {"prompt": "x", "max_tokens": 60, "n": 2, "stream": True}
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                fleet.gate.clear()
                break
        await until(lambda: fleet.num_running == 0)

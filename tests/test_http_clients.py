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

from tests.fake_fleet import FakeFleet
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
async def sdk(base_url: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        httpx.AsyncClient(trust_env=False) as http,
        openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key=key, max_retries=0, http_client=http) as client,
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

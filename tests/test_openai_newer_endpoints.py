"""The official OpenAI client on /v1/responses and /v1/embeddings, over the application itself: a scripted talk."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from tests.fake_fleet import fake_vector
from tests.http_desk import Desk, desk
from tests.test_responses import flat
from tests.test_tools import call, serving, weather


@asynccontextmanager
async def client_of(d: Desk) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=d.app)
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="k", max_retries=0, http_client=http) as client,
    ):
        yield client


async def test_a_conversation_with_a_tool_whole_and_streamed() -> None:
    tools: Any = [flat(weather())]
    async with serving(f"I look.\n{call()}", "never") as d, client_of(d) as client:
        asked: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
        first = await client.responses.create(model="tiny", input=asked, tools=tools, instructions="be brief")
        assert first.output_text == "I look."
        called = next(item for item in first.output if item.type == "function_call")
        assert json.loads(called.arguments) == {"city": "Paris"}
        turn = [one.model_dump(exclude_none=True) for one in first.output]
        output = {"type": "function_call_output", "call_id": called.call_id, "output": "rain"}
        async with client.responses.stream(model="tiny", input=[*asked, *turn, output], tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        assert [item.type for item in final.output] == ["message", "function_call"]
        assert final.usage is not None
        assert final.usage.total_tokens == final.usage.input_tokens + final.usage.output_tokens


class Answer(BaseModel):
    a: int


async def test_an_answer_is_parsed_into_the_clients_own_type() -> None:
    async with serving('{"a": 7}') as d, client_of(d) as client:
        parsed = await client.responses.parse(model="tiny", input="a number", text_format=Answer)
        assert parsed.output_parsed == Answer(a=7)
        assert '"integer"' in (d.fleet.requests[0].sampling.grammar or "")


async def test_what_is_not_kept_is_refused_as_the_client_expects() -> None:
    async with serving("hi") as d, client_of(d) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_1")


async def test_embeddings_come_as_numbers_by_either_encoding() -> None:
    async with desk() as d, client_of(d) as client:
        for extra in ({}, {"encoding_format": "float"}):  # without it this client asks for base64
            asked: Any = {"model": "tiny", "input": ["hello", "hello world"], **extra}
            told = await client.embeddings.create(**asked)
            expected = [np.array(fake_vector(request)) for request in d.fleet.requests[-2:]]
            for one, vector in zip(told.data, expected, strict=True):
                assert one.embedding == pytest.approx((vector / np.linalg.norm(vector)).tolist())
            assert told.usage.prompt_tokens == sum(len(request.prompt) for request in d.fleet.requests[-2:])
        assert len((await client.embeddings.create(model="tiny", input="hello", dimensions=2)).data[0].embedding) == 2

"""The OpenAI client's own ways with tools and structured answers, against the application."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.http_desk import Desk
from tests.test_tools import HERMES, call, serving, weather

ASKED: Any = [{"role": "user", "content": "hello"}]


class Answer(BaseModel):
    city: str
    warm: bool


@asynccontextmanager
async def talking(*texts: str) -> AsyncIterator[tuple[openai.AsyncOpenAI, Desk]]:
    async with serving(*texts, template=HERMES) as d:
        yield openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="unused", http_client=d.http, max_retries=0), d


async def test_a_conversation_with_a_tool() -> None:
    tools: Any = [weather()]
    async with talking(call("Rome")) as (client, d):
        answer = await client.chat.completions.create(model="tiny", messages=ASKED, tools=tools)
        (asked,) = answer.choices[0].message.tool_calls or []
        assert answer.choices[0].finish_reason == "tool_calls"
        assert asked.type == "function"
        assert (asked.function.name, asked.function.arguments) == ("get_weather", '{"city": "Rome"}')
        said: Any = answer.choices[0].message.model_dump(exclude_none=True)
        result: Any = {"role": "tool", "tool_call_id": asked.id, "content": "Sunny"}
        await client.chat.completions.create(model="tiny", messages=[*ASKED, said, result], tools=tools)
        assert len(d.fleet.requests) == 2


async def test_the_clients_stream_helper_puts_a_call_together() -> None:
    tools: Any = [weather()]
    async with (
        talking(f"So.\n{call()}") as (client, _),
        client.chat.completions.stream(model="tiny", messages=ASKED, tools=tools) as stream,
    ):
        final = await stream.get_final_completion()
    (asked,) = final.choices[0].message.tool_calls or []
    assert asked.function.arguments == '{"city": "Paris"}'
    assert final.choices[0].message.content == "So."


async def test_the_clients_parse_sends_a_schema_and_reads_the_answer() -> None:
    async with talking('{"city": "Rome", "warm": true}') as (client, d):
        answer = await client.chat.completions.parse(model="tiny", messages=ASKED, response_format=Answer)
        grammar = d.fleet.requests[0].sampling.grammar
    assert answer.choices[0].message.parsed == Answer(city="Rome", warm=True)
    assert grammar is not None
    assert "warm" in grammar


async def test_a_refusal_is_a_bad_request_that_names_the_field() -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    async with talking("x") as (client, _):
        with pytest.raises(openai.BadRequestError) as refusal:
            await client.chat.completions.create(model="tiny", messages=ASKED, response_format=form)
    assert refusal.value.param == "response_format"

"""Tools, forms and vectors over gRPC ask and say what they do over HTTP."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from protos import inference_pb2 as pb
from tests.fake_fleet import FakeFleet, fake_vector
from tests.grpc_desk import GrpcDesk, endings, failure, grpc_desk, text_of, trailer
from tests.http_desk import MODEL, TEXT, desk, says
from tests.test_tools import HERMES, ROOMY, THINKING, call, weather
from tests.tiny_text import tiny_text

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
QUESTION = [("user", "hello")]
ASKED = [{"role": "user", "content": "hello"}]


def serving(*texts: str, template: str = HERMES) -> Any:
    return grpc_desk(fleet=FakeFleet(ROOMY, says(*texts)), text=tiny_text(template))


def tool(name: str = "get_weather") -> pb.Tool:
    function = weather(name)["function"]
    return pb.Tool(name=name, description="d", parameters=json.dumps(function["parameters"]))


def calls_of(messages: list[pb.GenerateResponse]) -> dict[int, tuple[str, str]]:
    """Names and arguments of a single choice's calls. Each call's first piece, and no other, has its id and name."""
    found: dict[int, tuple[str, str]] = {}
    for delta in (d for message in messages for choice in message.choices for d in choice.tool_calls):
        assert delta.HasField("id") == delta.HasField("name") == (delta.index not in found)
        name, arguments = found.get(delta.index, (delta.name, ""))
        found[delta.index] = name, arguments + delta.arguments
    return found


async def test_calls_come_as_they_are_written_and_the_text_is_without_them() -> None:
    async with serving("hi" + call() + call("Rome")) as client:
        messages = await client.generate(messages=QUESTION, tools=[tool()], max_tokens=500)
        assert text_of(messages) == "hi"
        assert calls_of(messages) == {
            0: ("get_weather", '{"city": "Paris"}'),
            1: ("get_weather", '{"city": "Rome"}'),
        }
        pieces = [d for m in messages for c in m.choices for d in c.tool_calls if d.index == 0]
        assert len(pieces) > 2
        assert endings(messages) == {0: ["FINISH_REASON_TOOL_CALLS"]}


async def test_a_conversation_that_is_only_tokenized_shows_its_tools() -> None:
    asked = pb.Conversation(messages=[pb.Message(role="user", content="hello")])
    async with serving("hi") as client:
        await client.generate(messages=QUESTION, tools=[tool()], max_tokens=5)
        told = await client.inference.Tokenize(pb.TokenizeRequest(conversation=asked, tools=[tool()]))
        assert list(told.token_ids) == client.fleet.requests[0].prompt.tolist()
        bare = await client.inference.Tokenize(pb.TokenizeRequest(conversation=asked))
        assert len(bare.token_ids) < len(told.token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.Tokenize(pb.TokenizeRequest(text="hello", tools=[tool()]))
        assert trailer(caught.value, "error-param") == "tools"


async def test_a_call_that_is_cut_off_ends_with_length() -> None:
    async with serving(call()) as client:
        messages = await client.generate(messages=QUESTION, tools=[tool()], max_tokens=len(TEXT.encode(call())) - 14)
        assert endings(messages) == {0: ["FINISH_REASON_LENGTH"]}
        assert calls_of(messages)[0][0] == "get_weather"


def conversation() -> pb.Conversation:
    made = pb.ToolCall(id="c1", name="get_weather", arguments='{"city": "Paris"}')
    return pb.Conversation(
        messages=[
            pb.Message(role="user", content="hello"),
            pb.Message(role="assistant", tool_calls=[made]),
            pb.Message(role="tool", content="sun", tool_call_id="c1"),
        ]
    )


async def test_the_prompt_shows_tools_calls_and_results_as_over_http() -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    told = [
        *ASKED,
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "content": "sun", "tool_call_id": "c1"},
    ]
    async with serving("hi") as client, desk(says("hi"), text=tiny_text(HERMES), model=ROOMY) as http:
        await client.generate(conversation=conversation(), tools=[tool()])
        await http.post("/v1/chat/completions", messages=told, tools=[weather()])
        ours, theirs = client.fleet.requests[0], http.fleet.requests[0]
        assert ours.prompt.tolist() == theirs.prompt.tolist()


@pytest.mark.parametrize(
    ("fields", "body"),
    [
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)}, {"tool_choice": "required"}),
        (
            {"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED), "parallel_tool_calls": False},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"tool_choice": pb.ToolChoice(function="b")},
            {"tool_choice": {"type": "function", "function": {"name": "b"}}},
        ),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_AUTO)}, {"tool_choice": "auto"}),
        ({"tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_NONE)}, {"tool_choice": "none"}),
    ],
)
async def test_what_must_be_called_is_asked_of_workers_as_over_http(fields: Any, body: Any) -> None:
    async with serving("hi") as client, desk(says("hi"), text=tiny_text(HERMES), model=ROOMY) as http:
        await client.generate(messages=QUESTION, tools=[tool("a"), tool("b")], seed=1, **fields)
        told = {"messages": ASKED, "tools": [weather("a"), weather("b")], "seed": 1, **body}
        assert (await http.post("/v1/chat/completions", **told)).status_code == 200
        ours, theirs = client.fleet.requests[0], http.fleet.requests[0]
        assert ours.prompt.tolist() == theirs.prompt.tolist()
        assert ours.sampling == theirs.sampling
        assert (ours.sampling.grammar is not None) == (
            "tool_choice" in body and body["tool_choice"] not in ("auto", "none")
        )


async def test_thoughts_are_told_apart() -> None:
    async with serving("<think>hm</think>\n\nhi", template=THINKING) as client:
        messages = await client.generate(messages=QUESTION, max_tokens=100)
        assert text_of(messages) == "hi"
        assert "".join(choice.reasoning for message in messages for choice in message.choices) == "hm"


@pytest.mark.parametrize(
    ("form", "body"),
    [
        ({"json_schema": json.dumps(SCHEMA)}, {"guided_json": SCHEMA}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"json_object": False}, {}),
        ({"regex": "[a-c]+"}, {"guided_regex": "[a-c]+"}),
        ({"choice": pb.TextChoices(texts=["yes", "no"])}, {"guided_choice": ["yes", "no"]}),
        ({"grammar": 'start: "a" | "b"'}, {"guided_grammar": 'start: "a" | "b"'}),
    ],
)
async def test_forms_are_those_of_http(form: Any, body: Any) -> None:
    async with grpc_desk() as client, desk() as http:
        await client.generate(prompt="hello", **form)
        await http.post("/v1/completions", prompt="hello", **body)
        ours, theirs = client.fleet.requests[0], http.fleet.requests[0]
        assert ours.sampling.grammar == theirs.sampling.grammar
        assert (ours.sampling.grammar is None) == (not body)


async def failed(client: GrpcDesk, **fields: Any) -> tuple[grpc.StatusCode, str | None]:
    error = await failure(client, **fields)
    return error.code(), trailer(error, "error-param")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "("}, "regex"),
        ({"choice": pb.TextChoices()}, "choice"),
        ({"grammar": "start: ???"}, "grammar"),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema"),
        ({"messages": QUESTION, "tools": [pb.Tool(name="a", parameters="[]")]}, "tools[0].parameters"),
        ({"messages": QUESTION, "tools": [pb.Tool(name="a", parameters="{")]}, "tools[0].parameters"),
        ({"messages": QUESTION, "tools": [pb.Tool(name="a b")]}, "tools"),
        ({"messages": QUESTION, "tools": [tool()], "tool_choice": pb.ToolChoice()}, "tool_choice"),
        ({"messages": QUESTION, "tools": [tool()], "tool_choice": pb.ToolChoice(mode=9)}, "tool_choice"),
        ({"messages": QUESTION, "tool_choice": pb.ToolChoice(mode=pb.TOOL_MODE_REQUIRED)}, "tool_choice"),
        ({"prompt": "hello", "tools": [tool()]}, "tools"),
        ({"conversation": pb.Conversation(chat_template_kwargs="[]")}, "chat_template_kwargs"),
        ({"messages": [("tool", "sun")]}, "messages"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(fields: Any, param: str) -> None:
    async with serving("hi") as client:
        assert await failed(client, **fields) == (grpc.StatusCode.INVALID_ARGUMENT, param)
        assert not client.fleet.requests


async def test_variables_of_the_template_reach_it() -> None:
    template = "{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with serving("hi", template=template) as client:
        told = pb.Conversation(messages=[pb.Message(role="user", content="x")], chat_template_kwargs='{"mood": "sad"}')
        await client.generate(conversation=told)
        assert TEXT.decode(client.fleet.requests[0].prompt.tolist()) == "sadx"


async def test_vectors_are_those_of_http() -> None:
    async with grpc_desk() as client, desk() as http:
        told = await client.inference.Embed(
            pb.EmbedRequest(texts=["hello", "hello world"], pooling=pb.POOLING_MEAN, normalize=False, dimensions=3)
        )
        body = {"input": ["hello", "hello world"], "pooling": "mean", "normalize": False, "dimensions": 3}
        answer = (await http.post("/v1/embeddings", **body)).json()
        assert [list(vector.values) for vector in told.vectors] == [one["embedding"] for one in answer["data"]]
        assert told.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
        told = await client.inference.Embed(pb.EmbedRequest(token_ids=[pb.TokenIds(ids=[5, 6])], normalize=False))
        assert list(told.vectors[0].values) == list(fake_vector(client.fleet.requests[-1]))
        assert client.fleet.requests[-1].prompt.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (pb.EmbedRequest(), "texts"),
        (pb.EmbedRequest(texts=["a"], token_ids=[pb.TokenIds(ids=[5])]), "token_ids"),
        (pb.EmbedRequest(texts=["a"], pooling=7), "pooling"),
        (pb.EmbedRequest(texts=["a"], dimensions=9), "dimensions"),
    ],
)
async def test_an_embedding_that_makes_no_sense_is_refused(asked: pb.EmbedRequest, param: str) -> None:
    async with grpc_desk(fleet=FakeFleet(MODEL, says("x"))) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.inference.Embed(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailer(caught.value, "error-param") == param

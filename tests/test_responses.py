"""POST /v1/responses over a scripted fleet: what is read, what is told whole and in events, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planner.errors import ForwardFailed, QueueFull
from tests.grammar_rig import TEXT
from tests.http_desk import Desk, desk, refusal, says
from tests.test_tools import HERMES, ROOMY, THINKING, call, serving, weather
from tests.tiny_text import tiny_text

PATH = "/v1/responses"


def flat(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", **tool["function"]}


async def respond(d: Desk, given: Any = "hello", **body: Any) -> dict[str, Any]:
    answer = await d.post(PATH, input=given, **body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def streamed(d: Desk, given: Any = "hello", **body: Any) -> list[dict[str, Any]]:
    answer = await d.post(PATH, input=given, stream=True, **body)
    assert answer.status_code == 200, answer.text
    blocks = answer.text.removesuffix("\n\n").split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        events.append(value)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    return events


def prompt(d: Desk) -> str:
    return TEXT.decode(d.fleet.requests[-1].prompt.tolist())


async def test_a_text_is_answered_by_one_message() -> None:
    async with desk(says("hi there"), model=ROOMY) as d:
        told = await respond(d, instructions="be brief", metadata={"a": "b"}, max_output_tokens=50)
        (message,) = told["output"]
        assert (told["object"], told["status"], told["error"], told["store"]) == ("response", "completed", None, False)
        assert (message["type"], message["role"], message["status"]) == ("message", "assistant", "completed")
        assert [(part["type"], part["text"]) for part in message["content"]] == [("output_text", "hi there")]
        assert told["usage"]["input_tokens"] == len(d.fleet.requests[0].prompt)
        assert told["usage"]["output_tokens"] == len(TEXT.encode("hi there")) + 1
        assert (told["instructions"], told["metadata"], told["max_output_tokens"]) == ("be brief", {"a": "b"}, 50)
        shown = prompt(d).replace("<|start|>", "").split("<|stop|>")
        assert shown == ["system:be brief", "user:hello", "assistant:"]


async def test_an_answer_that_is_cut_is_incomplete_and_says_why() -> None:
    async with desk(says("hi there"), model=ROOMY) as d:
        told = await respond(d, max_output_tokens=2)
        assert (told["status"], told["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert told["output"][0]["status"] == "incomplete"
        assert (await streamed(d, max_output_tokens=2))[-1]["type"] == "response.incomplete"


async def test_a_stream_tells_its_events_in_openais_order() -> None:
    async with desk(says("hi there"), model=ROOMY) as d:
        events = await streamed(d)
        kinds = [one["type"].removeprefix("response.") for one in events]
        deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "hi there"
        assert kinds == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *["output_text.delta"] * len(deltas),
            *("output_text.done", "content_part.done", "output_item.done", "completed"),
        ]
        assert {one["response"]["id"] for one in events if "response" in one} == {events[0]["response"]["id"]}
        whole = await respond(d)
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
        assert events[-1]["response"]["usage"] == whole["usage"]


async def test_thoughts_and_calls_are_items_of_their_own() -> None:
    text = f"<think>Where?</think>I look.\n{call()}\n{call('Rome')}"
    async with serving(text, template=THINKING) as d:
        told = await respond(d, tools=[flat(weather())])
        kinds = [item["type"] for item in told["output"]]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        assert told["output"][0]["content"][0]["text"] == "Where?"
        assert told["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
        assert [(c["name"], json.loads(c["arguments"])) for c in told["output"][2:]] == [
            ("get_weather", {"city": "Paris"}),
            ("get_weather", {"city": "Rome"}),
        ]
        assert len({c["call_id"] for c in told["output"][2:]}) == 2
        events = await streamed(d, tools=[flat(weather())])
        done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == kinds
        assert [one["output_index"] for one in events if one["type"] == "response.output_item.added"] == [0, 1, 2, 3]
        for item in done:
            kind = {"reasoning": "reasoning_text", "message": "output_text"}.get(
                item["type"], "function_call_arguments"
            )
            deltas = [
                one["delta"]
                for one in events
                if one["type"] == f"response.{kind}.delta" and one["item_id"] == item["id"]
            ]
            assert "".join(deltas) == (item["arguments"] if "arguments" in item else item["content"][0]["text"])


async def test_the_output_of_one_turn_is_input_of_the_next() -> None:
    async with serving(call(), "It rains.") as d:
        asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "weather?"}]}]
        first = await respond(d, asked, tools=[flat(weather())])
        (called,) = first["output"]
        output = {"type": "function_call_output", "call_id": called["call_id"], "output": "rain"}
        await respond(d, [*asked, called, output], tools=[flat(weather())])
        assert f"[assistant:get_weather(Paris)][tool#{called['call_id']}:rain]" in prompt(d)


async def test_calls_and_thoughts_join_the_turn_they_belong_to() -> None:
    async with serving("ok") as d:
        arguments = json.dumps({"city": "Rome"})
        items: list[Any] = [
            {"type": "message", "role": "user", "content": "a"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": arguments},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
            {"type": "function_call_output", "call_id": "c2", "output": "2"},
        ]
        await respond(d, items)
        assert prompt(d).endswith("[user:a][assistant:bf(Rome)g(Rome)][tool#c1:1][tool#c2:2]")


async def test_a_schema_and_a_required_call_become_grammars() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with serving('{"a": 1}') as d:
        await respond(d, text={"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}})
        assert '"integer"' in (d.fleet.requests[-1].sampling.grammar or "")
        await respond(d, text={"format": {"type": "json_object"}})
        assert d.fleet.requests[-1].sampling.grammar is not None
        await respond(d, text={"format": {"type": "text"}})
        assert d.fleet.requests[-1].sampling.grammar is None
        named = {"type": "function", "name": "get_weather"}
        for choice in ("required", named):
            told = await respond(d, tools=[flat(weather())], tool_choice=choice)
            assert told["tool_choice"] == choice
            assert d.fleet.requests[-1].sampling.grammar is not None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "no"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "no"}}}}, "text"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"input": "hello " * 5000}, "input"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
async def test_what_is_not_supported_is_refused_by_its_name(body: dict[str, Any], param: str) -> None:
    async with serving("hi") as d:
        assert refusal(await d.post(PATH, **({"input": "hello"} | body)))["param"] == param
        assert not d.fleet.requests


async def test_what_is_no_text_is_told_by_its_kind() -> None:
    async with serving("hi") as d:
        parts = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
        told = refusal(await d.post(PATH, input=parts))["message"]
        assert told == "input[0].content[0]: content of type input_image is not supported; this model reads text"
        told = refusal(await d.post(PATH, input=[{"type": "web_search_call"}]))["message"]
        assert told.endswith('or a reasoning item, not an object of type "web_search_call"')


async def test_what_asks_for_nothing_is_taken() -> None:
    async with serving("hi") as d:
        neutral = {"store": False, "background": False, "include": [], "truncation": "disabled", "reasoning": {}}
        assert (await respond(d, **neutral, previous_response_id=None))["status"] == "completed"


async def test_a_refusal_has_its_status_and_a_late_failure_ends_the_stream() -> None:
    async with desk(says("hi there"), text=tiny_text(HERMES), model=ROOMY) as d:
        d.fleet.refusal_later = QueueFull("full")
        assert refusal(await d.post(PATH, input="hello", stream=True), 429)["code"] == "queue_full"
        d.fleet.refusal_later, d.fleet.fail_after = None, (2, ForwardFailed("broken"))
        events = await streamed(d)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["code"] == "server_error"
        assert events[-1]["response"]["output"][0]["status"] == "incomplete"

"""Tools over HTTP: what the prompt shows, how calls are told whole and in a stream, and what a required call is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from cluster.language.chat_template import ChatTemplate
from cluster.language.text import TextModel
from cluster.language.tool_formats import ToolFormat, tool_format
from cluster.language.tool_reader import ToolReader
from tests.grammar_rig import TEXT, walk
from tests.http_desk import CHAT, MODEL, Desk, desk, joined, refusal, says
from tests.test_tool_reader import gather
from tests.tiny_text import EOS, tiny_text, tiny_tokenizer
from worker.grammars import Grammars

BODY = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}|{{ t.function.parameters | tojson }};{% endfor %}"
    "{% endif %}"
    "{% for m in messages %}[{{ m.role }}{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}]{% endfor %}"
)
HERMES = BODY + "{# <tool_call> </tool_call> #}"
LLAMA = BODY + "{# <|python_tag|> #}"
MISTRAL = BODY + "{# [TOOL_CALLS] #}"
THINKING = HERMES + "{# <think> </think> #}"
ROOMY = replace(MODEL, context=4096, capacity=8192)


def weather(name: str = "get_weather", **changes: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters, **changes}}


def call(city: str = "Paris", name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def serving(*texts: str, template: str = HERMES) -> Any:
    return desk(says(*texts), text=tiny_text(template), model=ROOMY)


async def ask(d: Desk, **body: Any) -> dict[str, Any]:
    answer = await d.post("/v1/chat/completions", **CHAT, **body)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def test_calls_are_told_in_the_message() -> None:
    async with serving(f"I look.\n{call()}\n{call('Rome')}") as d:
        choice = await ask(d, tools=[weather()])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "I look."
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    ]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert {one["type"] for one in message["tool_calls"]} == {"function"}


async def test_a_call_alone_has_no_content_and_content_alone_no_calls() -> None:
    async with serving(call(), "Hello.") as d:
        answer = await d.post("/v1/chat/completions", **CHAT, tools=[weather()], n=2)
    called, spoken = answer.json()["choices"]
    assert called["message"]["content"] is None
    assert spoken["message"]["content"] == "Hello."
    assert "tool_calls" not in spoken["message"]
    assert (called["finish_reason"], spoken["finish_reason"]) == ("tool_calls", "stop")


async def test_a_stream_tells_the_name_first_and_then_the_arguments_in_pieces() -> None:
    async with serving(f"So.\n{call()}\n{call('Rome')}") as d:
        events = await d.events("/v1/chat/completions", **CHAT, tools=[weather()])
    deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]" and e["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert joined(events) == "So."
    calls: dict[int, dict[str, str]] = {}
    pieces = [one for delta in deltas for one in delta.get("tool_calls", [])]
    for one in pieces:
        if one["index"] not in calls:
            assert one["id"]
            assert one["type"] == "function"
            calls[one["index"]] = {"name": one["function"]["name"], "arguments": ""}
        else:
            assert one.keys() == {"index", "function"}
        calls[one["index"]]["arguments"] += one["function"]["arguments"]
    assert [json.loads(calls[i]["arguments"]) for i in (0, 1)] == [{"city": "Paris"}, {"city": "Rome"}]
    assert len(pieces) > 8
    reasons = [e["choices"][0]["finish_reason"] for e in events if e != "[DONE]" and e["choices"]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


async def test_a_call_that_is_cut_off_ends_with_length() -> None:
    async with desk(says(call(), ends=False), text=tiny_text(HERMES), model=ROOMY) as d:
        choice = await ask(d, tools=[weather()], max_tokens=50)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_the_prompt_shows_tools_calls_and_their_results() -> None:
    said = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    ]
    async with serving("ok") as d:
        await d.post("/v1/chat/completions", messages=messages, tools=[weather()])
        await d.post("/v1/chat/completions", messages=messages, tools=[weather()], tool_choice="none")
        shown, hidden = [TEXT.decode(request.prompt.tolist()) for request in d.fleet.requests]
    assert shown.startswith('get_weather|{"type": "object"')
    assert hidden == "[user:hi][assistant:get_weather(Rome)][tool#c1:Sunny]"
    assert shown.endswith(hidden)


async def test_without_tools_on_offer_a_call_is_text() -> None:
    async with serving(call()) as d:
        for body in ({}, {"tools": [weather()], "tool_choice": "none"}):
            choice = await ask(d, **body)
            assert choice["message"]["content"] == call()
            assert choice["finish_reason"] == "stop"


@pytest.fixture
def grammars() -> Iterator[Grammars]:
    made = Grammars(TEXT.vocabulary)
    yield made
    made.close()


async def grammar_of(template: str, **body: Any) -> str:
    async with serving("x", template=template) as d:
        await d.post("/v1/chat/completions", **CHAT, **body)
        grammar = d.fleet.requests[0].sampling.grammar
    assert grammar is not None
    return grammar


@pytest.mark.parametrize("template", [HERMES, LLAMA, MISTRAL, MISTRAL + "{# [ARGS] #}"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "b"}}])
async def test_a_required_call_is_one_that_the_reader_reads(template: str, choice: Any, grammars: Grammars) -> None:
    tools = [weather("a"), weather("b"), weather("c", parameters=None)]
    grammar = await grammar_of(template, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    form = tool_format(template)
    assert form is not None
    called = set()
    for seed in range(12):
        text = walk(grammars, grammar, seed, max_tokens=2000)
        if text is None:  # the third tool takes anything, and may go on for ever
            continue
        reader = ToolReader(form, frozenset("abc"))
        content, calls, _ = gather(reader.push(text) + reader.finish())
        assert (content, len(calls)) == ("", 1)
        name, arguments = calls[0]
        called.add(name)
        assert isinstance(json.loads(arguments), dict)
        assert name == "c" or json.loads(arguments)["city"] in ("Paris", "Rome")
    assert called >= {"a", "b"} if choice == "required" else called == {"b"}


async def test_several_required_calls_may_follow_one_another(grammars: Grammars) -> None:
    grammar = await grammar_of(HERMES, tools=[weather()], tool_choice="required")
    counts = set()
    for seed in range(12):
        reader = ToolReader(ToolFormat.HERMES, frozenset())
        calls = gather(reader.push(walk(grammars, grammar, seed, max_tokens=3000) or "") + reader.finish())[1]
        counts.add(len(calls))
    assert max(counts) > 1


async def test_a_form_beside_tools_is_the_form_or_a_call(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    grammar = await grammar_of(HERMES, tools=[weather()], response_format=asked, parallel_tool_calls=False)
    answers = {walk(grammars, grammar, seed) for seed in range(40)}
    assert answers == {call("Paris"), call("Rome"), '{"ok": true}', '{"ok": false}'}


async def test_marks_that_a_tokenizer_calls_special_are_seen_and_not_shown() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    text = TextModel(tokenizer, eos_ids=frozenset({EOS}), chat_template=ChatTemplate(MISTRAL))
    mark = text.marks["[TOOL_CALLS]"]
    said = text.encode('[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}}]')
    assert said[0] == mark
    async with desk(lambda *_: [*said, EOS], text=text, model=replace(ROOMY, vocab_size=text.vocab_size)) as d:
        choice = await ask(d, tools=[weather()])
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
        assert (await ask(d))["message"]["content"].startswith('[{"name"')
        await d.post("/v1/chat/completions", **CHAT, tools=[weather()], tool_choice="required")
        grammar = d.fleet.requests[-1].sampling.grammar
    grammars = Grammars(text.vocabulary)
    from tests.grammar_rig import allowed, mask_of, row

    assert allowed(mask_of(grammars, row(grammar or ""))) == [mark]
    grammars.close()


async def test_thoughts_are_told_apart() -> None:
    async with serving("<think>Hm.</think>\n\nYes.", template=THINKING) as d:
        message = (await ask(d))["message"]
        assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")
        events = await d.events("/v1/chat/completions", **CHAT)
    deltas = [e["choices"][0]["delta"] for e in events if e != "[DONE]"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert joined(events) == "Yes."


async def test_thoughts_that_the_prompt_opens_are_told_apart() -> None:
    async with serving("Hm.</think>Yes.", template=THINKING + "<think>\n") as d:
        message = (await ask(d))["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hm.")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [weather("no spaces please")]}, "tools"),
        ({"tools": [weather(), weather()]}, "tools"),
        (
            {"tools": [weather(parameters={"type": "strange"})], "tool_choice": "required"},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [weather()], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [weather()], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [weather()], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [weather()], "tool_choice": "required", "guided_json": {}}, "guided_json"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages"),
        *[
            (
                {
                    "messages": [
                        {
                            "role": "assistant",
                            "tool_calls": [
                                {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
                            ],
                        }
                    ]
                },
                "messages",
            )
            for arguments in ("{", '{"a":' * 50_000, '{"city": "\\ud800"}')
        ],
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with serving("x") as d:
        error = refusal(await d.post("/v1/chat/completions", **{**CHAT, **body}))
        assert error["param"] == param
        assert not d.fleet.requests


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "{{ messages[0].content }}{{ tools }}"])
async def test_a_model_that_takes_no_tools_says_so(template: str) -> None:
    async with serving("x", template=template) as d:
        assert refusal(await d.post("/v1/chat/completions", **CHAT, tools=[weather()]))["param"] == "tools"

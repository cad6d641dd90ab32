"""Whole answers and streams: shapes, numbering, usage, stops."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.routing.fleet import ServedModel
from planner.request import Request
from tests.fake_fleet import FakeFleet
from tests.http_desk import (
    CHAT,
    MODEL,
    PROMPT,
    TEXT,
    VOCAB,
    desk,
    endings,
    joined,
    says,
)
from tests.tiny_text import EOS


async def test_a_completion_has_the_shape_that_clients_parse() -> None:
    async with desk() as d:
        answer = (await d.post("/v1/completions", model="tiny", **PROMPT)).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"] == [{"index": 0, "text": "hi there", "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 8,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_a_chat_answer_has_the_shape_that_clients_parse() -> None:
    async with desk(says("hi")) as d:
        answer = (await d.post("/v1/chat/completions", **CHAT)).json()
    assert answer["object"] == "chat.completion"
    message = {"role": "assistant", "content": "hi", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == 3, "the token that ends an answer counts and is not shown"


async def test_a_chat_prompt_is_what_the_template_writes() -> None:
    async with desk() as d:
        await d.post("/v1/chat/completions", **CHAT)
    prompt = [int(token) for token in d.fleet.requests[0].prompt]
    assert TEXT.decode(prompt) == "<|start|>user:hello<|stop|><|start|>assistant:"


async def test_a_chat_without_a_budget_gets_what_is_left_of_the_context() -> None:
    async with desk() as d:
        await d.post("/v1/chat/completions", **CHAT)
    request = d.fleet.requests[0]
    assert request.max_tokens == MODEL.context - len(request.prompt)


async def test_a_chat_without_a_budget_is_bounded_by_the_pool() -> None:
    small = ServedModel("tiny", 0, VOCAB, context=64, capacity=40, max_num_seqs=8)
    async with desk(model=small) as d:
        await d.post("/v1/chat/completions", **CHAT)
    request = d.fleet.requests[0]
    assert request.max_tokens == 40 - len(request.prompt)


async def test_several_prompts_with_n_are_numbered_prompt_by_prompt() -> None:
    def script(request: Request, index: int) -> list[int]:
        return [int(request.prompt[0]), *TEXT.encode(str(index)), EOS]

    async with desk(script) as d:
        body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 8}
        whole = (await d.post("/v1/completions", **body)).json()
        events = await d.events("/v1/completions", **body)
    texts = ["x0", "x1", "y0", "y1"]
    assert [(c["index"], c["text"]) for c in whole["choices"]] == list(enumerate(texts))
    assert [joined(events, i) for i in range(4)] == texts
    assert endings(events) == {i: ["stop"] for i in range(4)}
    assert whole["usage"]["prompt_tokens"] == 2, "a prompt counts once for all its choices"
    assert whole["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_says_what_the_whole_answer_says(path: str) -> None:
    async with desk(says("hello wörld 🦙 ok")) as d:
        body = {**(CHAT if "chat" in path else PROMPT), "max_tokens": 40}
        choice = (await d.post(path, **body)).json()["choices"][0]
        events = await d.events(path, **body)
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert joined(events) == text == "hello wörld 🦙 ok"
    assert endings(events) == {0: [choice["finish_reason"]]}
    assert events[-1] == "[DONE]"
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events[:-1]}) == 1
    assert all("usage" not in e for e in events[:-1])


async def test_the_first_chunk_of_each_choice_carries_the_role() -> None:
    async with desk(says("hi", "yo")) as d:
        events = await d.events("/v1/chat/completions", **CHAT, n=2)
    for index in range(2):
        deltas = [c["delta"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert all("role" not in delta for delta in deltas[1:])


async def test_usage_comes_in_a_last_chunk_without_choices() -> None:
    d_fleet = FakeFleet(MODEL, says("hi"), num_cached=3)
    async with desk(fleet=d_fleet) as d:
        events = await d.events("/v1/chat/completions", **CHAT, n=2, stream_options={"include_usage": True})
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 6
    assert events[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert all("usage" not in e for e in events[:-2])


async def test_half_a_character_is_never_sent() -> None:
    async with desk(says("🦙🦙")) as d:
        events = await d.events("/v1/completions", prompt="x", max_tokens=30)
    pieces = [e["choices"][0]["text"] for e in events[:-1]]
    assert [p for p in pieces if p] == ["🦙", "🦙"]


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)])
async def test_each_chunk_tells_the_counts_so_far_where_that_is_asked_for(path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with desk(says("four")) as d:
        *chunks, last, done = await d.events(path, **body, stream_options=options)
        plain = await d.events(path, **body, stream_options={"include_usage": True})
        without = await d.post(path, **body, stream=True, stream_options={"continuous_usage_stats": True})
    assert (without.status_code, without.json()["error"]["param"]) == (400, "stream_options")
    assert "include_usage" in without.json()["error"]["message"]
    assert done == "[DONE]"
    completed = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert completed == sorted(completed)
    assert completed[0] < completed[-1] == last["usage"]["completion_tokens"]
    assert all(chunk["choices"] for chunk in chunks)
    assert [chunk.get("usage") is not None for chunk in plain[:-1]] == [False] * (len(plain) - 2) + [True]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_cuts_across_tokens_and_frees_its_sequence(stream: bool, tokens_per_step: int) -> None:
    fleet = FakeFleet(MODEL, says("one, two, three, four", "nothing else"), tokens_per_step=tokens_per_step)
    async with desk(fleet=fleet) as d:
        body = {"prompt": "x", "max_tokens": 40, "n": 2, "stop": ["o, th", "zzz"]}
        if stream:
            events = await d.events("/v1/completions", **body, stream_options={"include_usage": True})
            texts = [joined(events, i) for i in range(2)]
            counted = events[-2]["usage"]["completion_tokens"]
        else:
            answer = (await d.post("/v1/completions", **body)).json()
            texts = [choice["text"] for choice in answer["choices"]]
            counted = answer["usage"]["completion_tokens"]
    assert texts == ["one, tw", "nothing else"]
    cut = next(n for n in range(99) if "o, th" in TEXT.decode(TEXT.encode("one, two, three, four")[:n]))
    assert counted == cut + len(TEXT.encode("nothing else")) + 1
    assert fleet.num_running == 0
    if tokens_per_step < 50:
        assert fleet.generations[0].cancelled == {0}


async def test_a_stop_string_at_once_leaves_an_empty_text() -> None:
    async with desk(says("hello")) as d:
        events = await d.events("/v1/completions", **PROMPT, stop="he")
        answer = (await d.post("/v1/chat/completions", **CHAT, stop="he")).json()
    assert joined(events) == ""
    assert endings(events) == {0: ["stop"]}
    assert answer["choices"][0]["message"]["content"] == ""


async def test_stop_tokens_end_an_answer_hidden_and_ignore_eos_lets_it_run() -> None:
    a = TEXT.encode("c")[0]
    async with desk(says("abcd")) as d:
        stopped = (await d.post("/v1/completions", **PROMPT, stop_token_ids=[a])).json()
        await d.post("/v1/completions", **PROMPT, ignore_eos=True)
    assert stopped["choices"][0] == {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    assert d.fleet.requests[0].stop_token_ids == {a, EOS}
    assert d.fleet.requests[1].stop_token_ids == frozenset()

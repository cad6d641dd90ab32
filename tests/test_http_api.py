"""The HTTP endpoints over a scripted fleet: shapes, parameters, refusals, streams and departures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from cluster.api_settings import ApiSettings
from cluster.fleet import ServedModel
from cluster.http_api import Service, create_app
from cluster.text import TextModel
from planner.errors import ForwardFailed, QueueFull, Unavailable, WorkerLost
from planner.request import Request
from tests.fake_fleet import FakeFleet
from tests.tiny_text import EOS, tiny_text

TEXT = tiny_text()
VOCAB = TEXT.vocab_size
MODEL = ServedModel(name="tiny", created=1700000000, vocab_size=VOCAB, context=64, capacity=256, max_num_seqs=8)
PROMPT = {"prompt": "hello", "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def says(*texts: str, ends: bool = True) -> Callable[[Request, int], list[int]]:
    """The i-th sequence says the i-th text (the last one for the rest), and then the end token."""
    spoken = [TEXT.encode(text) + ([EOS] if ends else []) for text in texts]
    return lambda request, index: spoken[min(index, len(spoken) - 1)]


@dataclass
class Desk:
    """A client, the application's fleet, and the application."""

    http: httpx.AsyncClient
    fleet: FakeFleet
    app: Any

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def events(self, path: str, **body: Any) -> list[Any]:
        answer = await self.post(path, **body, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream"
        return parse_events(answer.text)


def parse_events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    blocks = text[:-2].split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def joined(events: list[Any], index: int = 0) -> str:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def endings(events: list[Any]) -> dict[int, list[str]]:
    told: dict[int, list[str]] = {}
    for event in events:
        for choice in [] if event == "[DONE]" else event["choices"]:
            told.setdefault(choice["index"], [])
            if choice["finish_reason"] is not None:
                told[choice["index"]].append(choice["finish_reason"])
    return told


@asynccontextmanager
async def desk(
    script: Any = None, *, text: TextModel = TEXT, model: ServedModel | None = MODEL, fleet: Any = None, **settings: Any
) -> AsyncIterator[Desk]:
    fleet = fleet or FakeFleet(model, script or says("hi there"))
    app = create_app(Service(fleet, text, ApiSettings(**settings)))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield Desk(http, fleet, app)


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


# ---------------------------------------------------------------------------------------------- shapes


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


# ---------------------------------------------------------------------------------------------- stops


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


# ---------------------------------------------------------------------------------------------- echo and log probabilities


async def test_completion_logprobs_are_parallel_lists() -> None:
    async with desk(says("hello wö")) as d:
        body = {**PROMPT, "logprobs": 2}
        whole = (await d.post("/v1/completions", **body)).json()["choices"][0]
        events = await d.events("/v1/completions", **body)
    scores = whole["logprobs"]
    assert scores["tokens"] == ["hello", " w", "bytes:\\xc3", "bytes:\\xb6", "<|stop|>"]
    assert scores["text_offset"] == [0, 5, 7, 7, 8]
    assert scores["token_logprobs"] == [-0.5] * 5
    assert [len(top) for top in scores["top_logprobs"]] == [2] * 5
    streamed = [c["logprobs"] for e in events[:-1] for c in e["choices"]]
    for name, values in scores.items():
        assert [value for part in streamed for value in part[name]] == values


async def test_logprobs_zero_is_not_off() -> None:
    async with desk(says("hi")) as d:
        plain = (await d.post("/v1/completions", **PROMPT, logprobs=0)).json()["choices"][0]
        chat = (await d.post("/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=0)).json()["choices"][0]
    assert plain["logprobs"]["token_logprobs"] == [-0.5] * 3
    assert [entry["top_logprobs"] for entry in chat["logprobs"]["content"]] == [[], [], []]


async def test_chat_logprobs_bytes_join_to_the_text() -> None:
    async with desk(
        says("hé 🦙"),
    ) as d:
        choices = (await d.post("/v1/chat/completions", **CHAT, n=2, logprobs=True, top_logprobs=3)).json()["choices"]
    for choice in choices:
        content = choice["logprobs"]["content"]
        raw = b"".join(bytes(entry["bytes"] or []) for entry in content)
        assert raw.decode() == choice["message"]["content"] == "hé 🦙"
        assert all(len(entry["top_logprobs"]) == 3 for entry in content)


async def test_scores_of_text_that_a_stop_string_hides_are_hidden_too() -> None:
    async with desk(says("ab, cd")) as d:
        body = {**PROMPT, "stop": [", c"], "logprobs": 0}
        whole = (await d.post("/v1/completions", **body)).json()["choices"][0]
        events = await d.events("/v1/completions", **body)
    assert whole["text"] == "ab"
    assert whole["logprobs"]["tokens"] == ["ab"]
    assert [t for e in events[:-1] for c in e["choices"] for t in c["logprobs"]["tokens"]] == ["ab"]


@pytest.mark.parametrize("text", ["hello", "  naïve  🦙 café\t", "<|start|>x"])
async def test_echo_gives_back_the_very_prompt(text: str) -> None:
    async with desk(says("!")) as d:
        whole = (await d.post("/v1/completions", prompt=text, max_tokens=2, echo=True, n=2)).json()
        events = await d.events("/v1/completions", prompt=text, max_tokens=2, echo=True, n=2)
        by_ids = (await d.post("/v1/completions", prompt=TEXT.encode(text), max_tokens=2, echo=True)).json()
    assert [c["text"] for c in whole["choices"]] == [text + "!"] * 2
    assert [joined(events, i) for i in range(2)] == [text + "!"] * 2
    assert by_ids["choices"][0]["text"] == text + "!"


async def test_echo_with_logprobs_scores_prompt_and_answer() -> None:
    async with desk(says("!?", ends=False)) as d:
        body = {"prompt": "hello wab", "max_tokens": 2, "echo": True, "logprobs": 1, "n": 2}
        answer = (await d.post("/v1/completions", **body)).json()
        events = await d.events("/v1/completions", **body)
    for index in range(2):
        scores = answer["choices"][index]["logprobs"]
        assert scores["tokens"] == ["hello", " w", "ab", "!", "?"]
        assert scores["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert scores["top_logprobs"][0] is None
        assert scores["text_offset"] == [0, 5, 7, 9, 10]
        parts = [c["logprobs"] for e in events[:-1] for c in e["choices"] if c["index"] == index]
        assert [t for part in parts for t in part["text_offset"]] == scores["text_offset"]


async def test_a_prompt_is_scored_without_generating() -> None:
    async with desk() as d:
        scored = (await d.post("/v1/completions", prompt="hello wab", max_tokens=0, echo=True, logprobs=1)).json()
        plain = (await d.post("/v1/completions", prompt="hello wab", max_tokens=0, echo=True)).json()
        events = await d.events("/v1/completions", prompt="hello wab", max_tokens=0, echo=True)
    for answer in (scored, plain):
        assert answer["choices"][0]["text"] == "hello wab"
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
    assert scored["choices"][0]["logprobs"]["tokens"] == ["hello", " w", "ab"]
    assert joined(events) == "hello wab"
    assert len(d.fleet.requests) == 1, "an echo alone is no work for a worker"


# ---------------------------------------------------------------------------------------------- parameters reach the worker


async def test_parameters_reach_the_worker_as_they_were_sent() -> None:
    async with desk() as d:
        await d.post(
            "/v1/completions",
            **PROMPT,
            temperature=0.5,
            top_p=0,
            top_k=-1,
            min_p=0.1,
            seed=-1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"5": -100, "6": 2.5},
            min_tokens=3,
            priority=-2,
            user="me",
            metadata={"a": 1},
        )
    request = d.fleet.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.0, 0, 0.1)
    assert sampling.seed == 2**64 - 1
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert sampling.logit_bias == ((5, -100.0), (6, 2.5))
    assert (request.min_tokens, request.priority, request.max_tokens) == (3, -2, 8)


async def test_seed_zero_is_a_seed_and_no_seed_varies() -> None:
    async with desk() as d:
        for seed in (0, 0, None, None, 2**63 - 1, 2**64 - 1):
            assert (await d.post("/v1/completions", **PROMPT, seed=seed)).status_code == 200
    seeds = [request.sampling.seed for request in d.fleet.requests]
    assert seeds[:2] == [0, 0]
    assert seeds[2] != seeds[3]
    assert seeds[4:] == [2**63 - 1, 2**64 - 1]


async def test_null_means_not_set() -> None:
    names = (
        "stop stream n seed top_p logit_bias user tools response_format stream_options top_logprobs logprobs".split()
    )
    async with desk() as d:
        answer = await d.post("/v1/chat/completions", **CHAT, model=None, **dict.fromkeys(names))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 3.7),
        ("max_tokens", 3.0),
        ("max_tokens", "3"),
        ("max_tokens", True),
        ("max_tokens", 2**63),
        ("max_tokens", -1),
        ("stream", "false"),
        ("stream", 0),
        ("n", -1),
        ("n", 0),
        ("n", 1000000),
        ("suffix", " end"),
        ("top_p", 1.5),
        ("top_p", "1"),
        ("temperature", -1),
        ("temperature", True),
        ("top_k", 1.5),
        ("logit_bias", {"150000": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", []),
        ("stop_token_ids", [999999]),
        ("stop_token_ids", [-1]),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("logprobs", 100000),
        ("logprobs", True),
        ("logprobs", -1),
        ("best_of", 3),
        ("use_beam_search", True),
        ("response_format", {"type": "json_object"}),
        ("min_tokens", 9),
        ("stream_options", {"include_usage": True}),
        ("echo", 1),
        ("whatever", 1),
        ("presence_penalty", 3),
        ("prompt", None),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [""]),
        ("prompt", [[]]),
        ("prompt", 5),
        ("prompt", [100, VOCAB]),
        ("prompt", [100, -1]),
        ("prompt", [1, True]),
        ("prompt", ["a", 1]),
        ("prompt", {"a": 1}),
    ],
)
async def test_a_wrong_completion_field_is_refused_by_name(field: str, value: Any) -> None:
    async with desk() as d:
        answer = await d.post("/v1/completions", **{**PROMPT, field: value})
    error = refusal(answer)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert not d.fleet.requests, "nothing is sent before all is checked"


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("messages", [], "messages"),
        ("messages", None, "messages"),
        ("messages", ["Hi"], "messages[0]"),
        ("messages", [{"role": "user"}], "content"),
        ("messages", [{"role": "user", "content": None}], "content"),
        ("messages", [{"role": "user", "content": 5}], "content"),
        ("messages", [{"role": "user", "content": []}], "content"),
        ("messages", [{"role": "wizard", "content": "x"}], "role"),
        ("messages", [{"content": "x"}], "role"),
        ("messages", [{"role": "user", "content": "x", "colour": 1}], "colour"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}], "tool"),
        ("messages", [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "tool_calls"),
        ("top_logprobs", 3, "logprobs"),
        ("tools", [{"type": "function"}], "tools"),
        ("tool_choice", "auto", "tool_choice"),
        ("response_format", {"type": "yaml"}, "response_format"),
        ("chat_template_kwargs", {"never_read": 1}, "never_read"),
        ("max_completion_tokens", 1.5, "max_completion_tokens"),
        ("suffix", "x", "suffix"),
        ("prompt", "x", "prompt"),
    ],
)
async def test_a_wrong_chat_field_is_refused_by_name(field: str, value: Any, word: str) -> None:
    async with desk() as d:
        for stream in (False, True):
            error = refusal(await d.post("/v1/chat/completions", **{**CHAT, "stream": stream, field: value}))
            assert error["param"] == field
            assert word in error["message"]
    assert not d.fleet.requests


async def test_fields_that_ask_for_nothing_special_are_accepted() -> None:
    neutral = {
        "best_of": 1,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "parallel_tool_calls": True,
        "max_completion_tokens": 3,
        "max_tokens": 3,
    }
    async with desk() as d:
        answer = await d.post("/v1/chat/completions", **CHAT, **neutral)
    assert answer.status_code == 200
    assert d.fleet.requests[0].max_tokens == 3


async def test_a_text_part_reads_like_a_plain_string() -> None:
    async with desk() as d:
        await d.post("/v1/chat/completions", **CHAT)
        await d.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        )
    assert list(d.fleet.requests[0].prompt) == list(d.fleet.requests[1].prompt)


async def test_an_assistant_without_content_is_empty_and_never_the_word_none() -> None:
    async with desk() as d:
        await d.post("/v1/chat/completions", messages=[*CHAT["messages"], {"role": "assistant", "content": None}])
    prompt = TEXT.decode([int(token) for token in d.fleet.requests[0].prompt])
    assert prompt == "<|start|>user:hello<|stop|><|start|>assistant:<|stop|><|start|>assistant:"


async def test_the_final_message_is_continued_and_not_followed_by_a_new_turn() -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "The answer is "}]
    async with desk() as d:
        await d.post("/v1/chat/completions", messages=messages, continue_final_message=True)
        both = await d.post(
            "/v1/chat/completions", messages=messages, continue_final_message=True, add_generation_prompt=True
        )
        alone = await d.post("/v1/chat/completions", **CHAT, continue_final_message=True)
    prompt = TEXT.decode([int(token) for token in d.fleet.requests[0].prompt])
    assert prompt.endswith("<|start|>assistant:The answer is ")
    assert refusal(both)["param"] == "continue_final_message"
    assert refusal(alone)["param"] == "continue_final_message"


# ---------------------------------------------------------------------------------------------- context


async def test_the_context_is_exact_to_the_token() -> None:
    async with desk() as d:
        fits = await d.post("/v1/completions", prompt=[5] * 63, max_tokens=1)
        full = refusal(await d.post("/v1/completions", prompt=[5] * 64, max_tokens=1))
        over = refusal(await d.post("/v1/completions", prompt=[5] * 63, max_tokens=2))
        default = await d.post("/v1/completions", prompt=[5] * 60)
        last_id = await d.post("/v1/completions", prompt=[100, VOCAB - 1], max_tokens=2)
    assert fits.json()["usage"]["prompt_tokens"] == 63
    assert full["code"] == over["code"] == "context_length_exceeded"
    assert (full["param"], over["param"]) == ("prompt", "max_tokens")
    assert "63" in over["message"]
    assert "64" in over["message"]
    assert default.status_code == 200, "a default budget shrinks to what is left"
    assert last_id.json()["usage"]["prompt_tokens"] == 2


async def test_a_hopeless_text_is_refused_without_tokenising_it() -> None:
    async with desk() as d:
        error = refusal(await d.post("/v1/completions", prompt="a" * 2_000_000, max_tokens=1))
        chat = refusal(await d.post("/v1/chat/completions", messages=[{"role": "user", "content": "a" * 2_000_000}]))
    assert error["code"] == chat["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


# ---------------------------------------------------------------------------------------------- refusals and failures


async def test_a_refusal_has_its_own_status_streaming_or_not() -> None:
    for refused in (QueueFull("full", retry_after_s=2.5), Unavailable("none left")):
        for later in (False, True):
            fleet = FakeFleet(MODEL, says("x"))
            if later:
                fleet.refusal_later = refused
            else:
                fleet.refusal_at_submit = refused
            async with desk(fleet=fleet) as d:
                for stream in (False, True):
                    answer = await d.post("/v1/completions", **PROMPT, stream=stream)
                    status = 429 if isinstance(refused, QueueFull) else 503
                    assert refusal(answer, status)["code"] == refused.code
                    assert answer.headers["retry-after"] == ("3" if status == 429 else "1")


async def test_one_refused_prompt_of_a_batch_frees_the_others() -> None:
    class SecondIsRefused(FakeFleet):
        def submit(self, request: Request) -> Any:
            if self.generations:
                raise QueueFull("full")
            return super().submit(request)

    async with desk(fleet=SecondIsRefused(MODEL, says("x"))) as d:
        refusal(await d.post("/v1/completions", prompt=["a", "b"], max_tokens=4), 429)
    assert d.fleet.generations[0].cancelled == {0}


async def test_a_failure_before_the_first_token_is_a_status() -> None:
    fleet = FakeFleet(MODEL, says("x"), fail_after=(0, WorkerLost("gone")))
    async with desk(fleet=fleet) as d:
        for stream in (False, True):
            assert refusal(await d.post("/v1/completions", **PROMPT, stream=stream), 503)["code"] == "worker_lost"


async def test_a_stream_that_fails_says_so_and_ends() -> None:
    fleet = FakeFleet(MODEL, says("hello there"), fail_after=(2, ForwardFailed("it broke")))
    async with desk(fleet=fleet) as d:
        events = await d.events("/v1/chat/completions", **CHAT, n=2)
        whole = await d.post("/v1/chat/completions", **CHAT, n=2)
    assert events[-1]["error"] == {
        "message": "it broke",
        "type": "server_error",
        "param": None,
        "code": "forward_failed",
    }
    assert endings(events[:-1]) == {0: [], 1: []}
    assert joined(events[:-1]) == "hello "
    refusal(whole, 500)


async def test_a_deadline_ends_the_request_and_frees_it() -> None:
    fleet = FakeFleet(MODEL, says("x"), gate=asyncio.Event())
    async with desk(fleet=fleet) as d:
        answer = await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-timeout-ms": "20"})
        bad = [
            await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-timeout-ms": value})
            for value in ("abc", "-1", "0", "1.5")
        ]
    assert refusal(answer, 408)["code"] == "deadline_exceeded"
    assert fleet.num_running == 0
    for one in bad:
        assert refusal(one)["param"] == "x-request-timeout-ms"


# ---------------------------------------------------------------------------------------------- clients that leave


@dataclass
class RawClient:
    """Speaks ASGI itself, so that it can leave at an exact moment. `sent` is what the application has written."""

    app: Any
    body: dict[str, Any]
    path: str = "/v1/completions"

    def __post_init__(self) -> None:
        self.sent: list[Any] = []
        self.news = asyncio.Event()
        self.leave = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.asked = False

    async def receive(self) -> Any:
        if not self.asked:
            self.asked = True
            return {"type": "http.request", "body": json.dumps(self.body).encode(), "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        await self.reads.wait()
        self.sent.append(message)
        self.news.set()

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "headers": [(b"content-type", b"application/json")],
            "server": ("gateway", 80),
            "client": ("client", 1),
        }
        await self.app(scope, self.receive, self.send)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("running", [False, True])
async def test_a_client_that_leaves_ends_every_sequence_at_once(stream: bool, running: bool) -> None:
    fleet = FakeFleet(MODEL, says("a" * 60, ends=False))
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {"prompt": ["x", "y"], "n": 3, "max_tokens": 50, "stream": stream})
        fleet.gate.clear()
        serving = asyncio.create_task(client.run())
        await until(lambda: len(fleet.generations) == 2)
        if running:
            fleet.gate.set()
            await asyncio.sleep(0)
            await until(lambda: not stream or bool(client.sent))
            fleet.gate.clear()
        client.leave.set()
        await asyncio.wait_for(serving, 5)
    assert fleet.num_running == 0
    if not stream:
        assert not client.sent


async def test_a_client_gone_before_the_start_costs_nothing() -> None:
    fleet = FakeFleet(MODEL, says("a" * 60, ends=False), gate=asyncio.Event())
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {"prompt": "x", "max_tokens": 50})
        client.leave.set()
        await asyncio.wait_for(client.run(), 5)
    assert fleet.num_running == 0


async def test_a_client_that_does_not_read_holds_up_only_itself() -> None:
    fleet = FakeFleet(MODEL, says("a" * 40, ends=False))
    async with desk(fleet=fleet) as d:
        lazy = RawClient(d.app, {"prompt": "x", "max_tokens": 40, "stream": True})
        lazy.reads.clear()
        serving = asyncio.create_task(lazy.run())
        await until(lambda: bool(fleet.generations))
        others = [await d.post("/v1/completions", **PROMPT) for _ in range(4)]
        assert [answer.status_code for answer in others] == [200] * 4
        assert fleet.num_running == 1, "an unread stream is not drained into a buffer"
        lazy.reads.set()
        await asyncio.wait_for(serving, 5)
    events = parse_events(b"".join(m.get("body", b"") for m in lazy.sent).decode())
    assert joined(events) == "a" * 40


async def test_the_first_token_is_written_before_the_second_exists() -> None:
    fleet = FakeFleet(MODEL, says("abcdef", ends=False), gate=asyncio.Event())

    class OneStep(asyncio.Event):
        async def wait(self) -> Any:
            await super().wait()
            self.clear()
            return True

    fleet.gate = OneStep()
    async with desk(fleet=fleet) as d:
        client = RawClient(d.app, {**PROMPT, "stream": True})
        serving = asyncio.create_task(client.run())
        fleet.gate.set()
        await until(lambda: len(client.sent) >= 2)
        assert b'"text":"ab"' in client.sent[1]["body"]
        client.leave.set()
        await asyncio.wait_for(serving, 5)


async def test_a_silent_stream_says_that_it_lives() -> None:
    fleet = FakeFleet(MODEL, says("hi"), gate=asyncio.Event())
    async with desk(fleet=fleet, keepalive_s=0.01) as d:
        client = RawClient(d.app, {**PROMPT, "stream": True})
        serving = asyncio.create_task(client.run())
        await until(lambda: len(client.sent) >= 3)
        assert client.sent[1]["body"].startswith(b":")
        fleet.gate.set()
        await asyncio.wait_for(serving, 5)
    events = parse_events(b"".join(m.get("body", b"") for m in client.sent).decode())
    assert joined(events) == "hi"


# ---------------------------------------------------------------------------------------------- HTTP itself


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b'{"prompt":"caf\xe9("}',
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","temperature":-Infinity}',
        b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
async def test_a_broken_body_is_the_clients_error(body: bytes) -> None:
    async with desk() as d:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            refusal(await d.http.post(path, content=body, headers={"content-type": "application/json"}))


async def test_a_nul_character_is_text_and_the_content_type_does_not_matter() -> None:
    async with desk() as d:
        answer = await d.http.post("/v1/completions", content=b'{"prompt":"a\\u0000b"}')
    assert answer.status_code == 200


async def test_a_body_over_the_limit_is_413_also_when_its_length_is_not_told() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 300

    async with desk(max_body_bytes=1000) as d:
        told = await d.http.post("/v1/completions", content=b" " * 1001)
        untold = await d.http.post("/v1/completions", content=pieces())
    assert refusal(told, 413)["code"] == refusal(untold, 413)["code"] == "body_too_large"


async def test_a_key_opens_everything_but_the_probes() -> None:
    async with desk(api_keys=("one", "two")) as d:
        for headers in (
            {},
            {"authorization": "Bearer three"},
            {"authorization": "Basic one"},
            {"authorization": "one"},
        ):
            answer = await d.http.post("/v1/completions", json=PROMPT, headers=headers)
            assert refusal(answer, 401)["code"] == "unauthenticated"
            assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("one", "two"):
            answer = await d.http.post("/v1/completions", json=PROMPT, headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        for path in ("/health", "/ready", "/version"):
            assert (await d.http.get(path)).status_code == 200
        for path in ("//v1/completions", "/V1/completions", "/v1//completions", "/v1/completions?x=1", "/health/"):
            assert (await d.http.post(path, json=PROMPT)).status_code == 401


async def test_a_preflight_needs_no_key_and_every_answer_may_be_read() -> None:
    origin = {"origin": "http://example.test"}
    async with desk(api_keys=("one",)) as d:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
        preflight = await d.http.options("/v1/chat/completions", headers=origin | asks)
        refused = await d.http.post("/v1/completions", json=PROMPT, headers=origin)
        key = {"authorization": "Bearer one"}
        good = await d.http.post("/v1/completions", json=PROMPT, headers=origin | key)
        bad = await d.http.post("/v1/completions", json={**PROMPT, "n": 0}, headers=origin | key)
    assert preflight.status_code == 200
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert [a.status_code for a in (refused, good, bad)] == [401, 200, 400]
    for answer in (preflight, refused, good, bad):
        assert answer.headers["access-control-allow-origin"] in ("*", "http://example.test")


async def test_a_request_id_is_echoed_or_made() -> None:
    async with desk() as d:
        given = await d.http.post("/v1/completions", json=PROMPT, headers={"x-request-id": "mine-1"})
        made = [await d.http.post("/v1/completions", json=PROMPT) for _ in range(2)]
        odd = await d.http.get("/v1/models", headers={"x-request-id": "x" * 300})
        nowhere = await d.http.get("/nowhere", headers={"x-request-id": "mine-2"})
    assert given.headers["x-request-id"] == "mine-1"
    assert nowhere.headers["x-request-id"] == "mine-2"
    assert made[0].headers["x-request-id"] != made[1].headers["x-request-id"]
    assert len(odd.headers["x-request-id"]) == 32


async def test_unknown_paths_and_methods_answer_in_json() -> None:
    async with desk() as d:
        refusal(await d.http.get("/v1/nothing-here"), 404)
        wrong = await d.http.get("/v1/chat/completions")
        refusal(await d.http.post("/v1/chat/completions/", json=CHAT), 404)
        refusal(await d.http.get("//v1/models"), 404)
    refusal(wrong, 405)
    assert wrong.headers["allow"] == "POST"


async def test_models_are_listed_and_found() -> None:
    async with desk(served_model_names=("a/b", "c")) as d:
        listed = (await d.http.get("/v1/models")).json()
        one = (await d.http.get("/v1/models/a/b")).json()
        unknown = refusal(await d.http.get("/v1/models/nope"), 404)
        other = refusal(await d.post("/v1/completions", **PROMPT, model="tiny"), 404)
        second = (await d.post("/v1/completions", **PROMPT, model="c")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["a/b", "c"]
    assert one == listed["data"][0]
    assert one["max_model_len"] == 64
    assert unknown["code"] == other["code"] == "model_not_found"
    assert "nope" in unknown["message"]
    assert second["model"] == "c"


async def test_tokenize_and_detokenize_undo_each_other() -> None:
    text = "hello wörld 🦙<|stop|>"
    async with desk() as d:
        tokens = (await d.post("/tokenize", prompt=text, return_token_strs=True)).json()
        back = (await d.post("/detokenize", tokens=tokens["tokens"])).json()
        chat = (await d.post("/tokenize", **CHAT)).json()
        empty = (await d.post("/detokenize", model="tiny", tokens=[])).json()
        for path, body in (
            ("/tokenize", {"prompt": 5}),
            ("/tokenize", {}),
            ("/detokenize", {"tokens": [VOCAB]}),
            ("/detokenize", {"tokens": "x"}),
        ):
            refusal(await d.post(path, **body))
    assert back == {"prompt": text}
    assert empty == {"prompt": ""}
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert tokens["max_model_len"] == 64
    assert TEXT.decode(chat["tokens"]).endswith("<|start|>assistant:")


async def test_probes_tell_starting_ready_and_draining_apart() -> None:
    async with desk(model=None) as d:
        d.fleet.ready = False
        refusal(await d.http.get("/health"), 503)
        refusal(await d.http.get("/ready"), 503)
        refusal(await d.post("/v1/completions", **PROMPT), 503)
        d.fleet.model, d.fleet.ready = MODEL, True
        assert (await d.http.get("/health")).status_code == 200
        assert (await d.http.get("/ready")).status_code == 200
        d.fleet.ready = False
        assert (await d.http.get("/health")).status_code == 200
        refusal(await d.http.get("/ready"), 503)
        assert (await d.http.get("/version")).json() == {"version": "0.1.0"}


async def test_a_model_without_a_template_does_not_chat() -> None:
    async with desk(text=tiny_text(template=None)) as d:
        assert "template" in refusal(await d.post("/v1/chat/completions", **CHAT))["message"]


async def test_the_templates_own_words_reach_the_client() -> None:
    text = tiny_text("{{ raise_exception('roles must alternate') }}")
    async with desk(text=text) as d:
        error = refusal(await d.post("/v1/chat/completions", **CHAT))
    assert "roles must alternate" in error["message"]
    assert error["param"] == "messages"


async def test_long_prompts_wait_in_a_bounded_line() -> None:
    async with desk(inline_characters=0, tokenising_threads=1, max_tokenising=2) as d:
        answers = await asyncio.gather(*(d.post("/v1/completions", **PROMPT) for _ in range(8)))
    statuses = sorted(answer.status_code for answer in answers)
    assert set(statuses) == {200, 429}


async def test_an_unforeseen_error_is_a_plain_500(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Request, index: int) -> list[int]:
        raise ZeroDivisionError("inner secret")

    async with desk(script) as d:
        error = refusal(await d.http.post("/v1/completions", json=PROMPT, headers={"origin": "http://x"}), 500)
    assert "secret" not in error["message"]
    assert "inner secret" in caplog.text

"""Echo and log probabilities, on both endpoints, whole and streamed."""

from __future__ import annotations

import pytest

from tests.http_desk import (
    CHAT,
    PROMPT,
    TEXT,
    desk,
    joined,
    says,
)
from tests.tiny_text import EOS


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


async def test_tokens_are_named_by_their_ids_where_that_is_asked_for() -> None:
    async with desk(says("hello wö")) as d:
        body = {**PROMPT, "logprobs": 1, "return_tokens_as_token_ids": True, "echo": True}
        scores = (await d.post("/v1/completions", **body)).json()["choices"][0]["logprobs"]
        asked = {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
        chat = (await d.post("/v1/chat/completions", **CHAT, **asked)).json()["choices"][0]["logprobs"]["content"]
    said = [*TEXT.encode("hello wö"), EOS]
    prompt = TEXT.encode(PROMPT["prompt"])
    assert scores["tokens"] == [f"token_id:{token}" for token in (*prompt, *said)]
    assert all(name.startswith("token_id:") for top in scores["top_logprobs"] if top for name in top)
    assert [entry["token"] for entry in chat] == [f"token_id:{token}" for token in said]
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in chat)
    assert bytes(byte for entry in chat for byte in entry["bytes"] or ()).decode() == "hello wö"


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

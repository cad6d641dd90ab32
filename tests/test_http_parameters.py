"""Parameters reach the worker as sent, and what is wrong is refused by its name."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http_desk import (
    CHAT,
    PROMPT,
    TEXT,
    VOCAB,
    desk,
    refusal,
)


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
    names = ["stop", "stream", "n", "seed", "top_p", "logit_bias", "user", "tools", "response_format", "logprobs"]
    names += ["stream_options", "top_logprobs", "max_completion_tokens", "add_generation_prompt"]
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
        ("logit_bias", {"7": 1, "07": 2}),
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
        ("best_of", 0),
        ("use_beam_search", 1),
        ("response_format", {"type": "json"}),
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
        ("messages", [{"role": "tool", "content": "x"}], "tool_call_id"),
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

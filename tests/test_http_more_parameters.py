"""The parameters that vLLM's clients send beside OpenAI's: what each does to the request, or to what is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.request import Request, SamplingParams, TokenLogprobs, Update
from tests.grammar_rig import TEXT
from tests.http_desk import CHAT, MODEL, PROMPT, desk, joined, refusal, says
from tests.tiny_text import EOS

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


async def request_of(path: str = COMPLETIONS, **body: Any) -> Request:
    async with desk() as d:
        answer = await d.post(path, **body)
        assert answer.status_code == 200, answer.text
        request: Request = d.fleet.requests[0]
        return request


async def text_of(said: str, **body: Any) -> str:
    async with desk(says(said)) as d:
        whole = (await d.post(COMPLETIONS, **{**PROMPT, "max_tokens": 30}, **body)).json()["choices"][0]["text"]
        assert joined(await d.events(COMPLETIONS, **{**PROMPT, "max_tokens": 30}, **body)) == whole
    return str(whole)


async def test_a_form_and_bad_words_go_to_the_worker_together() -> None:
    request = await request_of(**PROMPT, guided_choice=["yes", "no"], bad_words=["no"])
    assert request.sampling.grammar is not None
    assert request.sampling.bad_words


async def test_bad_words_go_to_the_worker_in_every_spelling() -> None:
    request = await request_of(**PROMPT, bad_words=["hello", "ab"])
    spelled = {TEXT.decode(list(word)) for word in request.sampling.bad_words}
    assert spelled == {"hello", " hello", "ab", " ab"}
    assert request.sampling.needs_history


async def test_a_long_prompt_is_cut_from_the_left() -> None:
    ids = list(range(10, 110))
    assert (await request_of(prompt=ids, max_tokens=4, truncate_prompt_tokens=5)).prompt.tolist() == ids[-5:]
    fitting = await request_of(prompt=ids, max_tokens=4, truncate_prompt_tokens=-1)
    assert fitting.prompt.tolist() == ids[-(MODEL.context - 4) :]
    text = await request_of(prompt="hello " * 500, max_tokens=4, truncate_prompt_tokens=3)
    assert len(text.prompt) == 3
    chat = await request_of(CHATS, **CHAT, max_tokens=4, truncate_prompt_tokens=6)
    assert TEXT.decode(chat.prompt.tolist()).endswith("tant:")


async def test_an_echo_of_a_prompt_that_was_cut_is_what_was_read() -> None:
    async with desk(says("!")) as d:
        answer = await d.post(COMPLETIONS, prompt="abcdef", max_tokens=2, truncate_prompt_tokens=2, echo=True)
    assert answer.json()["choices"][0]["text"] == "ef!"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"stop": "lo"}, "hel"),
        ({"stop": "lo", "include_stop_str_in_output": True}, "hello"),
        ({"stop": ["o w", "lo w"], "include_stop_str_in_output": True}, "hello w"),
        ({"stop": "zzz", "include_stop_str_in_output": True}, "hello world"),
        ({"stop": "l", "min_tokens": 1}, "hello wor"),
        ({"stop": "hello", "min_tokens": 4}, "hello world"),
        ({"stop_token_ids": TEXT.encode("w")}, "hello world"),
    ],
)
async def test_stop_strings_may_be_kept_and_wait_for_the_minimum(body: dict[str, Any], text: str) -> None:
    assert await text_of("hello world", **body) == text


async def test_a_stop_token_is_shown_where_stops_are_kept() -> None:
    letter = TEXT.encode("d")
    assert await text_of("abcd ef", stop_token_ids=letter) == "abc"
    assert await text_of("abcd ef", stop_token_ids=letter, include_stop_str_in_output=True) == "abcd"


async def test_special_tokens_are_shown_where_they_are_not_to_be_skipped() -> None:
    said = "<|start|>ab<|end|>c"
    assert await text_of(said) == "abc"
    assert await text_of(said, skip_special_tokens=False) == said  # the one that ends it is no text
    assert await text_of(said, skip_special_tokens=False, include_stop_str_in_output=True) == said + "<|stop|>"
    assert await text_of(said, skip_special_tokens=False, stop="<|end|>") == "<|start|>ab"
    async with desk(says(said)) as d:
        chat = (await d.post(CHATS, **CHAT, max_tokens=30, skip_special_tokens=False)).json()
    assert chat["choices"][0]["message"]["content"] == said


async def test_token_ids_are_told_where_they_are_asked_for() -> None:
    said = [*TEXT.encode("hi there"), EOS]
    async with desk(says("hi there")) as d:
        choice = (await d.post(COMPLETIONS, **{**PROMPT, "max_tokens": 20}, return_token_ids=True)).json()["choices"][0]
        assert (choice["prompt_token_ids"], choice["token_ids"]) == (TEXT.encode("hello"), said)
        chat = (await d.post(CHATS, **CHAT, return_token_ids=True)).json()
        assert chat["prompt_token_ids"] == d.fleet.requests[1].prompt.tolist()
        assert chat["choices"][0]["token_ids"] == said
        for path, body in ((COMPLETIONS, {**PROMPT, "max_tokens": 20}), (CHATS, CHAT)):
            events = await d.events(path, **body, return_token_ids=True)
            choices = [event["choices"][0] for event in events if event != "[DONE]"]
            assert [token for one in choices for token in one["token_ids"]] == said
            assert [("prompt_token_ids" in one) for one in choices] == [True] + [False] * (len(choices) - 1)
        plain = (await d.post(COMPLETIONS, **PROMPT)).json()["choices"][0]
        assert "token_ids" not in plain
        assert "prompt_token_ids" not in plain


async def test_the_best_of_several_are_told() -> None:
    async with desk(says("aaa", "bbb", "ccc", "ddd")) as d:
        body = {**PROMPT, "n": 2, "best_of": 4}
        answer = (await d.post(COMPLETIONS, **body)).json()
        request = d.fleet.requests[0]
    assert (request.n, request.sampling.logprobs) == (4, 0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert len({choice["text"] for choice in answer["choices"]}) == 2
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 16


def test_the_likeliest_mean_wins() -> None:
    from cluster.answers.answer import mean_logprob
    from cluster.answers.choice import Piece, ScoredToken

    def pieces(*logprobs: float | None) -> list[Piece]:
        return [Piece(0, "", tuple(ScoredToken(TokenLogprobs(1, p), 0) for p in logprobs))]

    assert mean_logprob(pieces(-1.0, -3.0)) == -2.0
    assert mean_logprob(pieces(None, -1.0)) > mean_logprob(pieces(-1.0, -1.5)) > mean_logprob(pieces())


async def test_prompt_log_probabilities_are_asked_for_and_told() -> None:
    ids = TEXT.encode("hello ab")
    told = [TokenLogprobs(token, -0.5, ((token, -0.5), (7, -1.0), (8, -2.0))) for token in ids[1:]]

    async with desk(says("hi")) as d:
        submit = d.fleet.submit

        def with_scores(request: Request) -> Any:
            generation = submit(request)
            next_news = generation.next
            first = [True]

            async def next_with_scores() -> list[Update]:
                news: list[Update] = await next_news()
                if first and news:
                    first.clear()
                    news = [news[0]._replace(prompt_logprobs=tuple(told)), *news[1:]]
                return news

            generation.next = next_with_scores
            return generation

        d.fleet.submit = with_scores
        answer = await d.post(COMPLETIONS, prompt=ids, max_tokens=4, prompt_logprobs=2)
        request = d.fleet.requests[0]
    choice = answer.json()["choices"][0]
    assert request.prompt_logprobs
    assert request.sampling.logprobs == 2
    assert choice["logprobs"] is None
    assert choice["text"] == "hi"
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    assert rest[0][str(ids[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": TEXT.tokens.name(ids[1])}
    assert rest[0].keys() == {str(ids[1]), "7"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": "x"}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": MODEL.context + 1}, "truncate_prompt_tokens"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1000}, "best_of"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"return_token_ids": 1}, "return_token_ids"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(body: dict[str, Any], param: str) -> None:
    async with desk() as d:
        assert refusal(await d.post(COMPLETIONS, **{**PROMPT, **body}))["param"] == param
        assert not d.fleet.requests


def test_a_word_without_tokens_is_refused() -> None:
    from planner.errors import InvalidRequest

    with pytest.raises(InvalidRequest, match="bad_words"):
        SamplingParams(bad_words=((1,), ()))
    assert replace(SamplingParams(), bad_words=((1, 2),)).needs_history

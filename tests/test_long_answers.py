"""Answers with very many log probabilities are written beside the event loop; short ones on it; both read alike."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import httpx
import pytest

from cluster.answers.choice import Piece, ScoredToken
from cluster.answers.maker import AnswerMaker, Service
from cluster.api_settings import ApiSettings
from cluster.batches.line import answer_line
from cluster.headers import Terms
from cluster.language.detokeniser import TokenBytes
from cluster.language.side_threads import SideThreads
from cluster.models import Models
from cluster.web.api import create_app
from cluster.web.json_parts import ITEMS_AT_ONCE, json_columns, json_list, json_object, with_fields
from planner.request import TokenLogprobs
from protos import openai_answers as wire
from protos.openai import ChatBody
from protos.openai_batches import BatchEndpoint
from protos.openai_responses import ResponsesBody
from tests.fake_fleet import FakeFleet
from tests.grpc_desk import grpc_desk
from tests.http_desk import CHAT, MODEL, TEXT, desk, says
from tests.tiny_text import tiny_text

T = TypeVar("T")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = replace(MODEL, context=1_000_000, capacity=1_000_000)
MANY = 2 * ITEMS_AT_ONCE + 3


class WatchedTokens(TokenBytes):
    """Knows which threads asked for a token's spelling, as who writes log probabilities does for each."""

    def __init__(self, tokens: TokenBytes) -> None:
        vars(self).update(vars(tokens))
        self.readers: set[int] = set()

    def of(self, token: int) -> bytes:
        self.readers.add(threading.get_ident())
        return super().of(token)


def watched_text() -> tuple[Any, WatchedTokens]:
    text = tiny_text()
    text.tokens = WatchedTokens(text.tokens)
    return text, text.tokens


def ids(count: int) -> list[int]:
    return [10 + i % 90 for i in range(count)]


ASKED = {
    "an echo": (COMPLETIONS, {"prompt": ids(400), "max_tokens": 2, "echo": True, "logprobs": 2}),
    "an echo in a stream": (
        COMPLETIONS,
        {"prompt": ids(400), "max_tokens": 0, "echo": True, "logprobs": 2, "stream": True},
    ),
    "a prompt's": (COMPLETIONS, {"prompt": ids(400), "max_tokens": 2, "prompt_logprobs": 2}),
    "a chat's prompt's": (
        CHATS,
        {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 2, "prompt_logprobs": 2},
    ),
    "an answer's": (CHATS, {**CHAT, "max_tokens": 400, "logprobs": True, "top_logprobs": 2}),
    "spellings": ("/tokenize", {"prompt": "x" * 5000, "return_token_strs": True}),
}


@pytest.mark.parametrize("which", ASKED)
async def test_many_log_probabilities_are_written_by_a_thread(which: str) -> None:
    path, body = ASKED[which]
    text, tokens = watched_text()
    async with desk(says("y" * 500), text=text, model=LONG) as d:
        answer = await d.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert tokens.readers
    assert threading.get_ident() not in tokens.readers


@pytest.mark.parametrize("which", ASKED)
async def test_few_are_written_at_once(which: str) -> None:
    path, body = ASKED[which]
    text, tokens = watched_text()
    async with desk(says("y" * 500), text=text, model=LONG, inline_size=1_000_000) as d:
        answer = await d.post(path, **body)
    assert answer.status_code == 200, answer.text
    assert tokens.readers == {threading.get_ident()}


async def test_grpc_messages_with_many_log_probabilities_are_made_by_a_thread() -> None:
    text, tokens = watched_text()
    async with grpc_desk(text=text, fleet=FakeFleet(LONG, says("y"))) as d:
        *_, last = await d.generate(ids=ids(400), max_tokens=1, prompt_logprobs=2)
        assert len(last.prompt_logprobs) == 400
        assert threading.get_ident() not in tokens.readers
        await d.generate(ids=ids(4), max_tokens=1, prompt_logprobs=2)
        assert threading.get_ident() in tokens.readers


@pytest.mark.parametrize("which", ASKED)
async def test_what_is_written_does_not_depend_on_who_writes_it(which: str) -> None:
    path, body = ASKED[which]
    answers = []
    for inline_size in (0, 1_000_000):
        async with desk(says("y" * 500), model=LONG, inline_size=inline_size) as d:
            answers.append((await d.post(path, **body)).text)
    first, second = (_without_identity(answer) for answer in answers)
    assert first == second
    assert first


def _without_identity(answer: str) -> list[Any]:
    events = [part.removeprefix("data: ") for part in answer.split("\n\n") if part]
    told = [event if event == "[DONE]" else json.loads(event) for event in events]
    return [event if event == "[DONE]" else {**event, "id": None, "created": None} for event in told]


async def test_all_that_is_written_in_parts_is_there_and_has_its_shape() -> None:
    asked = {"prompt": ids(MANY), "max_tokens": 1, "echo": True, "logprobs": 2, "prompt_logprobs": 1}
    async with desk(says("y"), model=LONG) as d:
        choice = wire.Completion.model_validate_json((await d.post(COMPLETIONS, **asked)).text).choices[0]
        said = {**CHAT, "max_tokens": MANY, "logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1}
        chat = wire.ChatCompletion.model_validate_json((await d.post(CHATS, **said)).text)
    scores = choice.logprobs
    assert scores is not None
    assert choice.prompt_logprobs is not None
    columns = (scores.tokens, scores.token_logprobs, scores.top_logprobs, scores.text_offset)
    assert [len(column) for column in columns] == [MANY + 1] * 4
    assert [next(iter(entry)) for entry in choice.prompt_logprobs[1:] if entry] == [str(one) for one in ids(MANY)[1:]]
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens
    assert chat.prompt_logprobs is not None
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


async def test_whoever_was_let_in_is_answered_however_many_long_texts_wait() -> None:
    body = ASKED["an echo"][1]
    async with desk(says("y"), model=LONG, text_threads=1, max_long_texts=0) as d:
        answers = await asyncio.gather(*(d.post(COMPLETIONS, **body) for _ in range(6)))
    assert [answer.status_code for answer in answers] == [200] * 6


class WatchedThreads(SideThreads):
    """Knows what its threads have made."""

    def __init__(self) -> None:
        super().__init__(inline_size=4096, num_threads=1, max_waiting=1)
        self.made: list[type] = []

    async def run(self, size: int, work: Callable[[], T]) -> T:
        return await super().run(size, lambda: self._watched(work))

    async def run_admitted(self, size: int, work: Callable[[], T]) -> T:
        return await super().run_admitted(size, lambda: self._watched(work))

    def _watched(self, work: Callable[[], T]) -> T:
        made = work()
        if threading.current_thread() is not threading.main_thread():
            self.made.append(type(made))
        return made


def watched_maker() -> tuple[AnswerMaker, WatchedThreads]:
    maker = AnswerMaker(Service(FakeFleet(LONG, says("y")), TEXT, ApiSettings(), model_name="tiny"))
    maker.threads = threads = WatchedThreads()
    return maker, threads


@pytest.mark.parametrize(("num_turns", "made"), [(4000, [ResponsesBody, ChatBody]), (2, [])])
async def test_a_long_conversation_of_responses_is_made_a_chat_by_a_thread(num_turns: int, made: list[type]) -> None:
    body = {"input": [{"role": "user", "content": "hi"}] * num_turns, "max_output_tokens": 1}
    maker, threads = watched_maker()
    transport = httpx.ASGITransport(app=create_app(Models([maker])))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert threads.made == made


LINES: dict[BatchEndpoint, tuple[str, list[type]]] = {
    "/v1/responses": ("input", [ResponsesBody, ChatBody]),
    "/v1/chat/completions": ("messages", [ChatBody]),
}


@pytest.mark.parametrize("endpoint", LINES)
async def test_a_long_line_of_a_batch_is_read_by_a_thread(endpoint: BatchEndpoint) -> None:
    param, made = LINES[endpoint]
    for num_turns, expected in ((4000, made), (2, [])):
        maker, threads = watched_maker()
        turns = [{"role": "user", "content": "hi"}] * num_turns
        await answer_line(maker, endpoint, {param: turns}, Terms())
        assert threads.made == expected


def test_lists_in_parts_are_what_the_serializer_writes_at_once() -> None:
    items: list[object] = [None, 1.5, "ä\n", {"b": 1e-7}, [1, 2]] * ITEMS_AT_ONCE
    assert json.loads(json_list(items)) == items
    assert json_list([]) == b"[]"
    for few in (items[:5], items):
        assert json.loads(json_columns(len(few), {"a": few, "b": iter(few)})) == {"a": few, "b": few}
    assert json.loads(json_object({"a": b"[1]", "b": b"null"})) == {"a": [1], "b": None}
    usage = wire.FunctionDelta(name="f", arguments='"arguments":1}')
    assert json.loads(with_fields(usage, {"name": b"[2]"})) == {"arguments": '"arguments":1}', "name": [2]}
    assert with_fields(usage, {}) == usage.to_json()


def test_a_piece_is_as_long_as_its_log_probabilities() -> None:
    def piece(num_scores: int, num_top: int) -> Piece:
        score = ScoredToken(TokenLogprobs(1, -0.5, ((1, -0.5),) * num_top), 0)
        return Piece(0, "x", (score,) * num_scores)

    assert piece(0, 0).size < piece(1, 0).size < piece(1, 5).size < piece(2, 5).size
    assert piece(100, 5).size == pytest.approx(100 * piece(1, 5).size, rel=0.05)

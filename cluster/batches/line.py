"""One line of a batch: the body of an endpoint, answered as that endpoint answers it, but for its priority."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from cluster.answers.embeddings import embed, plan_embeddings
from cluster.answers.maker import AnswerMaker
from cluster.headers import Terms
from cluster.web.answer_response import whole_answer
from cluster.web.bodies import validate
from cluster.web.embedding_api import embeddings_json
from cluster.web.response_telling import ResponseTelling
from cluster.web.responses import chat_of, own_names
from cluster.web.tellings import chat_telling, completion_telling
from planner.errors import InvalidRequest
from protos.openai import ChatBody, CompletionBody
from protos.openai_batches import BatchEndpoint
from protos.openai_embeddings import EmbeddingBody
from protos.openai_responses import ResponsesBody

B = TypeVar("B", bound=BaseModel)

LOWEST_PRIORITY: Final = 2**31 - 1
_ONLY_ALONE: Final = ("stream", "session_id", "priority", "background")


async def answer_line(maker: AnswerMaker, endpoint: BatchEndpoint, body: dict[str, Any], terms: Terms) -> Any:
    """The endpoint's answer as JSON. Raises `RaycombError` as the endpoint would; cancelled, it ends what runs."""
    for name in _ONLY_ALONE:
        if body.get(name):
            raise InvalidRequest(f"{name} means nothing in a batch", param=name)
    answered = await _ANSWERS[endpoint](maker, body | {"priority": LOWEST_PRIORITY}, terms)
    return await maker.threads.run_admitted(len(answered) // 16, lambda: json.loads(answered))


async def _read(maker: AnswerMaker, kind: type[B], given: dict[str, Any]) -> B:
    """The line's body, off the event loop where that is long. Raises `InvalidRequest`."""
    return await maker.threads.run_admitted(maker.threads.size_of(given), lambda: validate(kind, given))


async def _completion(maker: AnswerMaker, given: dict[str, Any], terms: Terms) -> bytes:
    body = await _read(maker, CompletionBody, given)
    answer, name = await maker.completion(body, terms)
    return await whole_answer(answer, completion_telling(maker, body, answer, name))


async def _chat(maker: AnswerMaker, given: dict[str, Any], terms: Terms) -> bytes:
    body = await _read(maker, ChatBody, given)
    answer, name, new_reader = await maker.chat(body, terms)
    return await whole_answer(answer, chat_telling(maker, body, answer, name, new_reader))


async def _response(maker: AnswerMaker, given: dict[str, Any], terms: Terms) -> bytes:
    body = await _read(maker, ResponsesBody, given)
    with own_names():
        chat = await maker.threads.run_admitted(maker.threads.size_of(body.input, body.tools), lambda: chat_of(body))
        answer, name, new_reader = await maker.chat(chat, terms)
    return await whole_answer(answer, ResponseTelling(body, name, new_reader))


async def _embeddings(maker: AnswerMaker, given: dict[str, Any], terms: Terms) -> bytes:
    body = await _read(maker, EmbeddingBody, given)
    plan = await plan_embeddings(maker, body, terms)
    meter = maker.service.meter.request(terms)
    with meter:
        vectors = await embed(maker.service.fleet, plan)
        meter.prompt(vectors.num_tokens)
    return await maker.threads.run_admitted(vectors.rows.size, lambda: embeddings_json(body, plan, vectors))


_ANSWERS: Final[dict[BatchEndpoint, Callable[[AnswerMaker, dict[str, Any], Terms], Awaitable[bytes]]]] = {
    "/v1/chat/completions": _chat,
    "/v1/completions": _completion,
    "/v1/embeddings": _embeddings,
    "/v1/responses": _response,
}

"""Vectors of texts: each is a prompt that workers prefill and nothing follows. Knows nothing of HTTP.

What the service says of a text is the hidden state of its last token, or the mean over its tokens, behind the model's
last norm. Models that were trained to embed say in their cards which of the two is theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cluster.answers.maker import AnswerMaker
from cluster.answers.prompts import EncodedPrompt
from cluster.headers import Terms
from cluster.routing.fleet import Fleet, ServedModel
from planner.errors import ContextLengthExceeded, InvalidRequest, RequestFailed
from planner.request import Pooling, Request, Vector
from protos.openai_embeddings import EmbeddingBody
from worker.tracing import traceparent

MAX_AT_ONCE: Final = 64
"""Prompts of one request that workers have at a time, so that it fills no queue alone."""


@dataclass(frozen=True, slots=True)
class Vectors:
    """`rows` float32[inputs, dimensions]; `num_tokens` of all inputs together."""

    rows: Vector
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """What workers are asked for, all of it checked, and what becomes of the vectors."""

    model: str
    requests: tuple[Request, ...]
    dimensions: int
    normalize: bool

    @property
    def num_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


async def plan_embeddings(maker: AnswerMaker, body: EmbeddingBody, terms: Terms) -> EmbeddingPlan:
    """Raises `RequestRefused`; nothing has been sent to a worker."""
    model, name, adapter = maker.model(body.model)
    terms.record.note_model(name)
    if model.vector_size is None:
        raise InvalidRequest(f"the model {name!r} is served by a program that gives no embeddings", param="model")
    dimensions = body.dimensions or model.vector_size
    if dimensions > model.vector_size:
        raise InvalidRequest(
            f"dimensions is {dimensions}; this model's vectors have {model.vector_size}", param="dimensions"
        )
    prompts = await maker.prompts.inputs(body, model.context)
    for prompt in prompts:
        _check(prompt, model)
    pooling = Pooling(body.pooling or maker.service.settings.embedding_pooling)
    trace = traceparent(terms.record.span)
    requests = tuple(
        Request(
            np.asarray(prompt.ids, np.int64),
            max_tokens=0,
            pooling=pooling,
            priority=body.priority,
            tenant=terms.tenant,
            deadline=terms.deadline,
            trace=trace,
            adapter=adapter,
        )
        for prompt in prompts
    )
    return EmbeddingPlan(name, requests, dimensions, body.normalize)


async def embed(fleet: Fleet, plan: EmbeddingPlan) -> Vectors:
    """Raises `RequestRefused` or `RequestFailed` as soon as one input is refused or fails; the others end then, as they
    do where this is cancelled."""
    found: dict[int, Sequence[float]] = {}
    waiting = iter(enumerate(plan.requests))
    tasks = [
        asyncio.create_task(_embed_each(fleet, waiting, found)) for _ in range(min(MAX_AT_ONCE, len(plan.requests)))
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    rows = np.array([found[index] for index in range(len(plan.requests))], np.float32)[:, : plan.dimensions]
    return Vectors(_of_length_one(rows) if plan.normalize else rows, plan.num_tokens)


async def _embed_each(fleet: Fleet, waiting: Iterator[tuple[int, Request]], found: dict[int, Sequence[float]]) -> None:
    for index, request in waiting:
        found[index] = await _embed_one(fleet, request)


async def _embed_one(fleet: Fleet, request: Request) -> Sequence[float]:
    generation = fleet.submit(request)
    try:
        while True:
            for update in await generation.next():
                if update.vector:
                    return update.vector
                if update.finish_reason is not None:
                    raise update.error or RequestFailed("the server gave the request up")
    finally:
        generation.cancel()


def _check(prompt: EncodedPrompt, model: ServedModel) -> None:
    length = len(prompt.ids)
    if length == 0:
        raise InvalidRequest("an input is empty; each needs at least one token", param="input")
    if (highest := max(prompt.ids)) >= model.vocab_size:
        raise InvalidRequest(f"input has token id {highest}; ids lie in [0, {model.vocab_size - 1}]", param="input")
    if length > model.context:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {model.context} tokens, and an input has {length}", param="input"
        )


def _of_length_one(rows: Vector) -> Vector:
    """Each row over its Euclidean length; one of zeros stays as it is."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)

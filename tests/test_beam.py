"""Beam search finds what a naive search over all beams finds, and its steps are requests of one token each."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import pytest

from cluster.answers.beam import Beam, BeamSearch
from planner.errors import ForwardFailed
from planner.request import Adapter, FinishReason, Request, TokenLogprobs, Update
from tests.grammar_rig import TEXT
from tests.grpc_desk import failure, grpc_desk, text_of
from tests.http_desk import MODEL, VOCAB, desk, refusal
from tests.tiny_text import EOS

LETTERS = [*TEXT.encode("abcde")[1:], EOS]


def likely(tokens: tuple[int, ...]) -> list[tuple[int, float]]:
    """Log probabilities of the next token, best first: a fixed function of the answer so far."""
    draw = random.Random(repr(tokens))
    weights = {token: draw.random() ** 3 for token in LETTERS}
    total = sum(weights.values())
    return sorted(((token, math.log(w / total)) for token, w in weights.items()), key=lambda pair: -pair[1])


class LikelyFleet:
    """Answers each request of one token with the alternatives of `likely`."""

    ready = True
    model = MODEL
    adapters: Mapping[str, Adapter] = MappingProxyType({})

    def __init__(self, fails_at: int | None = None) -> None:
        self.requests: list[Request] = []
        self.cancelled = 0
        self._fails_at = fails_at

    def submit(self, request: Request) -> Any:
        self.requests.append(request)
        return _OneToken(self, request, fails=len(self.requests) == self._fails_at)


class _OneToken:
    def __init__(self, fleet: LikelyFleet, request: Request, *, fails: bool) -> None:
        self._fleet, self._request, self._fails = fleet, request, fails

    async def next(self) -> list[Update]:
        await asyncio.sleep(0)
        if self._fails:
            return [Update(1, 0, finish_reason=FinishReason.FAILED, error=ForwardFailed("it broke"))]
        num = self._request.num_generated
        top = likely(tuple(self._request.prompt[len(self._request.prompt) - num :].tolist()))
        wanted = tuple(top[: self._request.sampling.logprobs or 0])
        score = TokenLogprobs(top[0][0], top[0][1], wanted)
        return [Update(1, 0, (top[0][0],), (score,), finish_reason=FinishReason.LENGTH)]

    def cancel(self, indices: Collection[int] | None = None) -> None:
        self._fleet.cancelled += 1


def naive(width: int, max_tokens: int, penalty: float) -> list[tuple[tuple[int, ...], bool]]:
    """Without any stop before the budget's end."""
    live, ended = [Beam()], list[Beam]()
    for _ in range(max_tokens):
        grown = []
        for beam in live:
            for token, p in likely(beam.tokens)[: 2 * width]:
                grown.append(Beam((*beam.tokens, token), beam.logprob + p, token == EOS))
        grown.sort(key=lambda beam: -beam.logprob)
        ended += [beam for beam in grown[: 2 * width] if beam.ended]
        live = [beam for beam in grown if not beam.ended][:width]
    best = sorted([*ended, *live], key=lambda beam: -beam.score(penalty))[:width]
    return [(beam.tokens, beam.ended) for beam in best]


@pytest.mark.parametrize(("width", "penalty"), list(itertools.product([1, 2, 3], [0.0, 1.0, 2.0])))
async def test_the_answers_are_those_of_a_naive_search(width: int, penalty: float) -> None:
    fleet = LikelyFleet()
    async with desk(fleet=fleet) as d:
        body = {"prompt": "hello", "max_tokens": 6, "n": width, "use_beam_search": True, "length_penalty": penalty}
        answer = (await d.post("/v1/completions", **body)).json()
    expected = naive(width, 6, penalty)
    told = [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]]
    assert told == [(TEXT.decode(list(t[: len(t) - e])), "stop" if e else "length") for t, e in expected]
    assert all(request.max_tokens == 1 and request.n == 1 for request in fleet.requests)
    assert len(fleet.requests) <= 1 + 5 * width


def test_a_wide_enough_beam_finds_the_likeliest_of_all() -> None:
    search = BeamSearch(width=125, max_tokens=3, stops=frozenset({EOS}), length_penalty=0.0)
    while not search.over:
        search.advance([likely(beam.tokens) for beam in search.live])
    best = max(
        (sum(dict(likely(tokens[:i]))[token] for i, token in enumerate(tokens)), tokens)
        for length in (1, 2, 3)
        for tokens in itertools.product(LETTERS, repeat=length)
        if EOS not in tokens[:-1] and (tokens[-1] == EOS or length == 3)
    )
    assert search.best()[0].tokens == best[1]
    assert search.best()[0].logprob == pytest.approx(best[0])


async def test_a_beam_that_fails_ends_the_search() -> None:
    fleet = LikelyFleet(fails_at=4)
    async with desk(fleet=fleet) as d:
        answer = await d.post("/v1/completions", prompt="hello", max_tokens=6, n=3, use_beam_search=True)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "it broke"
    assert len(fleet.requests) == 4


async def test_over_grpc_a_search_finds_the_same_and_tells_it_at_once() -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "n": 2, "best_of": 3, "use_beam_search": True, "length_penalty": 0.5}
    async with grpc_desk(fleet=LikelyFleet()) as client, desk(fleet=LikelyFleet()) as http:
        (message,) = await client.generate(**asked)
        answer = (await http.post("/v1/completions", prompt="hello", **asked)).json()
        assert [text_of([message], index) for index in range(2)] == [choice["text"] for choice in answer["choices"]]
        assert message.usage.completion_tokens == answer["usage"]["completion_tokens"]
        assert not any(choice.logprobs for choice in message.choices)


async def test_over_grpc_a_search_that_fails_says_so() -> None:
    async with grpc_desk(fleet=LikelyFleet(fails_at=4)) as client:
        error = await failure(client, max_tokens=6, n=3, use_beam_search=True)
        assert error.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"n": 11}, "n"),
        ({"best_of": 11}, "best_of"),
        ({"stream": True}, "stream"),
        ({"temperature": 0.5}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"logprobs": 1}, "logprobs"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ({"length_penalty": 1e308}, "length_penalty"),
        ({"length_penalty": -20.5}, "length_penalty"),
    ],
)
async def test_what_has_no_meaning_in_a_beam_search_is_refused(body: dict[str, Any], param: str) -> None:
    fleet = LikelyFleet()
    async with desk(fleet=fleet) as d:
        asked = {"prompt": "hello", "max_tokens": 4, "n": 2, "use_beam_search": True, **body}
        assert refusal(await d.post("/v1/completions", **asked))["param"] == param
    assert not fleet.requests
    assert max(LETTERS) < VOCAB

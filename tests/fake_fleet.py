"""A scriptable fleet without workers: the fake of `cluster.routing.fleet` that the HTTP tests put below the endpoints.

What a sequence says is scripted by `script(request, index) -> token ids`; it is cut to the request's budget and ends
with `stop` where a stop token comes. One token a live sequence goes out at each step, and steps wait for `gate`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from cluster.routing.fleet import ServedModel, WorkerReport
from cluster.routing.router import Predictions
from planner.errors import RequestFailed, RequestRefused
from planner.request import Adapter, FinishReason, Pooling, Request, TokenLogprobs, Update

Script = Callable[[Request, int], Sequence[int]]


def open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class FakeFleet:
    """Set the fields to script it; `generations` records what was submitted."""

    model: ServedModel | None
    script: Script
    ready: bool = True
    gate: asyncio.Event = field(default_factory=open_gate)
    refusal_at_submit: RequestRefused | None = None
    refusal_later: RequestRefused | None = None
    fail_after: tuple[int, RequestFailed] | None = None  # steps, and the error that follows them
    num_cached: int = 0
    tokens_per_step: int = 1
    generations: list[FakeGeneration] = field(default_factory=list)
    reports: tuple[WorkerReport, ...] = ()
    predictions: Predictions = field(default_factory=Predictions)
    adapters: dict[str, Adapter] = field(default_factory=dict)

    def num_without(self, name: str) -> int:
        return int(name not in self.adapters)

    def submit(self, request: Request) -> FakeGeneration:
        if self.refusal_at_submit is not None:
            raise self.refusal_at_submit
        generation = FakeGeneration(self, request, len(self.generations))
        self.generations.append(generation)
        return generation

    @property
    def requests(self) -> list[Request]:
        return [generation.request for generation in self.generations]

    @property
    def num_running(self) -> int:
        """Sequences that neither ended nor were cancelled."""
        return sum(len(generation.live) for generation in self.generations)


class FakeGeneration:
    """One submitted request. `cancelled` records which indices were ended by the client's side."""

    def __init__(self, fleet: FakeFleet, request: Request, number: int) -> None:
        self.request = request
        self.live = set(range(request.n))
        self.cancelled: set[int] = set()
        self._fleet = fleet
        self._number = number
        self._said = dict.fromkeys(range(request.n), 0)
        self._steps = 0

    async def next(self) -> list[Update]:
        await self._fleet.gate.wait()
        await asyncio.sleep(0)
        if self._fleet.refusal_later is not None:
            self.live.clear()
            raise self._fleet.refusal_later
        assert self.live, "next was called after every index had finished"
        failure = self._fleet.fail_after
        if failure is not None and self._steps >= failure[0]:
            failed, self.live = sorted(self.live), set()
            return [self._update(i, (), FinishReason.FAILED, failure[1]) for i in failed]
        self._steps += 1
        if self.request.pooling is not None:
            self.live.clear()
            return [Update(self._number, 0, finish_reason=FinishReason.LENGTH, vector=fake_vector(self.request))]
        return [self._step(index) for index in sorted(self.live)]

    def cancel(self, indices: Collection[int] | None = None) -> None:
        ended = self.live & (self.live if indices is None else set(indices))
        self.cancelled |= ended
        self.live -= ended

    def _step(self, index: int) -> Update:
        said = self._said[index]
        whole = list(self._fleet.script(self.request, index))[: self.request.max_tokens]
        tokens = tuple(whole[said : said + self._fleet.tokens_per_step])
        for place, token in enumerate(tokens):
            if token in self.request.stop_token_ids:
                self.live.discard(index)
                return self._update(index, tokens[: place + 1], FinishReason.STOP)
        self._said[index] += len(tokens)
        if self._said[index] < len(whole):
            return self._update(index, tokens, None)
        self.live.discard(index)
        return self._update(index, tokens, FinishReason.LENGTH)

    def _update(
        self, index: int, tokens: tuple[int, ...], reason: FinishReason | None, error: RequestFailed | None = None
    ) -> Update:
        alternatives = self.request.sampling.logprobs
        scores = () if alternatives is None else tuple(score(token, alternatives) for token in tokens)
        prompt: tuple[TokenLogprobs, ...] = ()
        if self.request.prompt_logprobs and self._steps == 1 and index == 0:
            ids = [int(token) for token in self.request.prompt]
            prompt = (TokenLogprobs(ids[0], None), *(score(token, alternatives or 0) for token in ids[1:]))
        return Update(self._number, index, tokens, scores, prompt, self._fleet.num_cached, reason, error)


def fake_vector(request: Request) -> tuple[float, ...]:
    """A test can tell by it of which tokens and how it was made."""
    tokens = request.prompt.tolist()
    if request.pooling is Pooling.LAST:
        return (float(tokens[-1]), float(len(tokens)), 1.0, 2.0)
    return (sum(tokens) / len(tokens), float(len(tokens)), -1.0, -2.0)


def score(token: int, alternatives: int) -> TokenLogprobs:
    """Log probabilities that a test can recompute: the token is the best, its followers are half as likely each."""
    return TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(alternatives)))

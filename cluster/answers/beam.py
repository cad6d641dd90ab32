"""Beam search: the likeliest answers found by keeping a few, each step the best continuations of all.

Each step of each beam is a request for one token behind the prompt and the beam, whose prefix is resident: beams that
grow from one another share its cells. So workers know nothing of beams. Method: Sutskever, Vinyals and Le, "Sequence to
Sequence Learning with Neural Networks" (2014); lengths are normalised as Hugging Face's `length_penalty` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.answers.answer import Answer
from cluster.answers.choice import Piece, TextRules
from cluster.answers.requests import ChoicePlan
from cluster.language.side_threads import SideThreads
from cluster.language.text import TextModel
from cluster.routing.fleet import Fleet, Generation
from cluster.telemetry.gateway_meter import RequestMeter
from planner.errors import RequestFailed
from planner.request import FinishReason, Request, SamplingParams, Update


@dataclass(frozen=True, slots=True)
class Beam:
    """`tokens` behind the prompt, and the sum of their log probabilities. `ended`: the last one is a stop token."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        """The higher the better; a stop token does not count as length."""
        return _normalised(self.logprob, len(self.tokens) - self.ended, length_penalty)


def _normalised(logprob: float, length: int, penalty: float) -> float:
    return float(logprob / max(1, length) ** penalty)


class BeamSearch:
    """The beams of one prompt. `width` of them go on at each step; a beam that ends leaves its place to others."""

    def __init__(self, width: int, max_tokens: int, stops: frozenset[int], length_penalty: float) -> None:
        self.live = [Beam()]
        self._width = width
        self._max_tokens = max_tokens
        self._stops = stops
        self._penalty = length_penalty
        self._ended: list[Beam] = []

    @property
    def over(self) -> bool:
        """Whether nothing that still goes on can become one of the best `width`."""
        if not self.live or len(self.live[0].tokens) >= self._max_tokens:
            return True
        if len(self._ended) < self._width:
            return False
        worst = sorted((beam.score(self._penalty) for beam in self._ended), reverse=True)[self._width - 1]
        # Sums only fall, so no beam ends better than its sum over the length that flatters it most.
        best = max(beam.logprob for beam in self.live)
        lengths = (len(self.live[0].tokens) + 1, self._max_tokens)
        return worst >= max(_normalised(best, length, self._penalty) for length in lengths)

    def advance(self, continuations: Sequence[Sequence[tuple[int, float]]]) -> None:
        """One step: for each live beam the likeliest next tokens and their log probabilities, best first."""
        grown = [
            Beam((*beam.tokens, token), beam.logprob + logprob, token in self._stops)
            for beam, found in zip(self.live, continuations, strict=True)
            for token, logprob in found
        ]
        grown.sort(key=lambda beam: -beam.logprob)
        self._ended += [beam for beam in grown[: 2 * self._width] if beam.ended]
        self.live = [beam for beam in grown if not beam.ended][: self._width]

    def best(self) -> list[Beam]:
        """The best `width`, best first."""
        everything = sorted([*self._ended, *self.live], key=lambda beam: -beam.score(self._penalty))
        return everything[: self._width]


class BeamAnswer(Answer):
    """Owner: the task that serves the HTTP request. Of one prompt; `plan.request` says the budget and the stops."""

    def __init__(
        self,
        fleet: Fleet,
        text: TextModel,
        plan: ChoicePlan,
        rules: TextRules,
        meter: RequestMeter,
        threads: SideThreads,
        length_penalty: float,
    ) -> None:
        super().__init__(fleet, text, [plan], rules, meter, threads, scored=False)
        assert plan.request is not None, "beams generate something"
        self._asked = plan.request
        self._running: list[Generation] = []
        self._search = BeamSearch(plan.n, plan.request.max_tokens, plan.request.stop_token_ids, length_penalty)

    async def start(self) -> list[Piece]:
        return []

    async def next(self, timeout_s: float) -> list[Piece]:
        """One step of all beams, however long it takes; after the last one everything that the best ones say."""
        if self._search.over:
            return self._tell()
        found = await self._continue_all()
        self._search.advance(found)
        return []

    async def _continue_all(self) -> list[tuple[tuple[int, float], ...]]:
        """One token behind each live beam. When one fails, or the client leaves, the others are given up."""
        tasks: list[asyncio.Task[tuple[tuple[int, float], ...]]] = []
        try:
            for beam in self._search.live:
                generation = self._fleet.submit(self._step(beam))
                self._running.append(generation)
                tasks.append(asyncio.create_task(_continuations(generation)))
            found = await asyncio.gather(*tasks)
            self._running.clear()
            return found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def ranked(self, choices: list[Sequence[Piece]]) -> list[Sequence[Piece]]:
        return choices  # they come in order

    async def close(self) -> None:
        for generation in self._running:
            generation.cancel()
        await super().close()

    def _step(self, beam: Beam) -> Request:
        request, grown = self._asked, np.asarray(beam.tokens, dtype=np.int64)
        return replace(
            request,
            prompt=np.concatenate([request.prompt, grown]),
            max_tokens=1,
            n=1,
            sampling=SamplingParams(temperature=0.0, logprobs=2 * self.num_choices),
            stop_token_ids=frozenset(),
            num_generated=len(beam.tokens),
        )

    def _tell(self) -> list[Piece]:
        choices = [choice for part in self._parts for choice in part.choices]
        self.meter.prompt(len(self._asked.prompt))
        pieces = []
        for choice, beam in zip(choices, self._search.best(), strict=True):
            reason = FinishReason.STOP if beam.ended else FinishReason.LENGTH
            piece = choice.take(Update(0, choice.index, beam.tokens, finish_reason=reason))
            assert piece is not None, "a last update is told"
            assert piece.ending is not None
            self.meter.tokens(choice.index, choice.num_tokens)
            self.meter.ended(piece.ending)
            pieces.append(piece)
        return pieces


async def _continuations(generation: Generation) -> tuple[tuple[int, float], ...]:
    """The likeliest next tokens of a beam. Raises what its request was refused with, or failed of."""
    top: tuple[tuple[int, float], ...] = ()
    while True:
        for update in await generation.next():
            for score in update.logprobs:
                top = score.top
            if update.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED):
                raise update.error or RequestFailed("the server gave the request up")
            if update.finish_reason is not None:
                return top

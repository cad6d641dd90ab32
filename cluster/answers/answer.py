"""Everything that one HTTP request asked workers for: its generations, and the choices that grow from them.

Choices are numbered prompt by prompt. Whatever ends the answer early (a refusal, a failure, a client that left),
`close` ends every generation that still runs. What is long to write is written by a thread, of an answer whose task
waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from cluster.answers.choice import SCORE_SIZE, Choice, Echo, Ending, Piece, TextRules
from cluster.answers.echoes import echo_of
from cluster.answers.requests import ChoicePlan
from cluster.language.side_threads import SideThreads
from cluster.language.text import TextModel
from cluster.routing.fleet import Fleet, Generation
from cluster.telemetry.gateway_meter import RequestMeter
from planner.errors import RaycombError, RequestFailed
from planner.request import FinishReason, TokenLogprobs, Update

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """`prompt` counts each prompt once, `cached` those of its tokens that needed no prefill."""

    prompt: int
    completion: int
    cached: int


@dataclass(frozen=True, slots=True)
class PromptTold:
    """A prompt's tokens, and their log probabilities where they were asked for and have come; the first has none."""

    ids: tuple[int, ...]
    scores: tuple[TokenLogprobs, ...]


def mean_logprob(pieces: Sequence[Piece]) -> float:
    """Of a choice's tokens; of none the worst."""
    found = [score.logprobs.logprob for piece in pieces for score in piece.scores]
    known = [logprob for logprob in found if logprob is not None]
    return sum(known) / len(known) if known else -math.inf


class Answer:
    """Owner: the task that serves the HTTP request; only it calls anything here."""

    def __init__(
        self,
        fleet: Fleet,
        text: TextModel,
        plans: Sequence[ChoicePlan],
        rules: TextRules,
        meter: RequestMeter,
        threads: SideThreads,
        *,
        scored: bool,
    ) -> None:
        self.meter = meter
        self._fleet = fleet
        self._threads = threads
        self._parts: list[_Part] = []
        for plan in plans:
            first = sum(part.plan.n for part in self._parts)
            choices = [Choice(first + i, text.tokens, rules, scored=scored) for i in range(plan.n)]
            self._parts.append(_Part(plan, choices, text, meter, threads))
        self._failure: RaycombError | None = None

    @property
    def num_choices(self) -> int:
        return sum(part.plan.n for part in self._parts)

    def prompt_of(self, index: int) -> PromptTold:
        """The prompt of the index-th choice that is told."""
        for part in self._parts:
            if index < part.plan.num_told:
                return PromptTold(tuple(part.plan.prompt.ids), tuple(part.prompt_scores()))
            index -= part.plan.num_told
        raise IndexError(index)

    def best(self, choices: Sequence[Sequence[Piece]]) -> list[Sequence[Piece]]:
        """Of each prompt's choices those with the likeliest tokens, as many as are told; they are numbered anew."""
        told: list[Sequence[Piece]] = []
        first = 0
        for part in self._parts:
            mine = list(choices[first : first + part.plan.n])
            first += part.plan.n
            if part.plan.num_told < part.plan.n:
                mine = self.ranked(mine)[: part.plan.num_told]
            told += mine
        return [[replace(piece, index=index) for piece in pieces] for index, pieces in enumerate(told)]

    @property
    def tells_best(self) -> bool:
        """Whether only the end shows which choices are told."""
        return any(part.plan.num_told < part.plan.n for part in self._parts)

    def pieces_of_best(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Of all pieces of the answer those of the choices that are told, one choice behind the other."""
        choices: list[list[Piece]] = [[] for _ in range(self.num_choices)]
        for piece in pieces:
            choices[piece.index].append(piece)
        return list(chain.from_iterable(self.best(choices)))

    def ranked(self, choices: list[Sequence[Piece]]) -> list[Sequence[Piece]]:
        """One prompt's choices, the best first."""
        return sorted(choices, key=mean_logprob, reverse=True)

    @property
    def finished(self) -> bool:
        """Whether every choice has had its last piece."""
        return self._failure is None and all(part.finished for part in self._parts)

    async def start(self) -> list[Piece]:
        """Submit everything; returns what can be said at once. Raises `RequestRefused`: then close."""
        return [piece for part in self._parts for piece in await part.start(self._fleet)]

    async def written(self, pieces: Iterable[Piece], write: Callable[[], T], *, whole: bool = False) -> T:
        """What `write` makes of these pieces, and of the prompts where the answer is told `whole`: at once, or by a
        thread where that takes long."""
        told = [SCORE_SIZE * part.num_prompt_scores for part in self._parts] if whole else []
        return await self._threads.run_admitted(
            self._threads.total(chain(told, (piece.size for piece in pieces))), write
        )

    async def next(self, timeout_s: float) -> list[Piece]:
        """News of the choices, or nothing when none comes in `timeout_s` seconds.

        Raises `RequestRefused` when no worker took a request, `RequestFailed` when an accepted one failed; what was
        generated before a failure is returned first.
        """
        if self._failure is not None:
            raise self._failure
        pieces: list[Piece] = []
        try:
            if len(self._parts) == 1:  # the usual case needs no task for each step
                await self._parts[0].take(await self._parts[0].next(timeout_s), pieces)
            else:
                waiting = {part.task(): part for part in self._parts if not part.finished}
                done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task, part in waiting.items():
                    if task in done:
                        await part.collect(pieces)
        except RaycombError as failure:
            if not pieces:
                raise
            self._failure = failure
        return pieces

    async def close(self) -> None:
        """End what still runs. Harmless when nothing does."""
        tasks = [task for part in self._parts if (task := part.stop()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

    def counts(self) -> TokenCounts:
        """Token counts so far."""
        return TokenCounts(
            prompt=sum(len(part.plan.prompt.ids) for part in self._parts),
            completion=sum(choice.num_tokens for part in self._parts for choice in part.choices),
            cached=sum(part.num_cached for part in self._parts),
        )


class _Part:
    """One prompt's generation and choices. Owner: the answer."""

    def __init__(
        self, plan: ChoicePlan, choices: list[Choice], text: TextModel, meter: RequestMeter, threads: SideThreads
    ) -> None:
        self.plan = plan
        self.choices = choices
        self.num_cached = 0
        self._text = text
        self._meter = meter
        self._threads = threads
        self._prompt_counted = False
        self._generation: Generation | None = None
        self._waiting: asyncio.Task[list[Update]] | None = None
        self._prompt_scores: dict[int, list[TokenLogprobs]] = {}

    @property
    def finished(self) -> bool:
        return all(choice.ended for choice in self.choices)

    @property
    def num_prompt_scores(self) -> int:
        """Log probabilities that are known of the prompt's tokens, alternatives included."""
        scores = self._prompt_scores.get(0, [])
        return len(scores) * (1 + len(scores[-1].top)) if scores else 0

    async def start(self, fleet: Fleet) -> list[Piece]:
        if self.plan.request is not None:
            self._generation = fleet.submit(self.plan.request)
            return []
        echo = await self._echo(0)
        self._count_prompt()
        for _ in self.choices:
            self._meter.ended(Ending.LENGTH)
        return [piece for choice in self.choices for piece in (choice.echo(echo), choice.end(Ending.LENGTH))]

    async def next(self, timeout_s: float) -> list[Update]:
        """The generation's next news, or nothing when none comes in time."""
        assert self._generation is not None, "started"
        try:
            async with asyncio.timeout(timeout_s):
                return await self._generation.next()
        except TimeoutError:
            return []

    def task(self) -> asyncio.Task[list[Update]]:
        """The task that waits for the generation's next news; kept until its result is collected."""
        assert self._generation is not None, "started"
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._generation.next())
        return self._waiting

    async def collect(self, pieces: list[Piece]) -> None:
        """Take in what the finished task has brought."""
        assert self._waiting is not None, "waiting"
        task, self._waiting = self._waiting, None
        await self.take(task.result(), pieces)

    async def take(self, updates: Sequence[Update], pieces: list[Piece]) -> None:
        """Append what the updates let be said. Raises the error of a failed sequence."""
        for update in updates:
            self.num_cached = max(self.num_cached, update.num_cached_tokens)
            if update.prompt_logprobs:
                self._prompt_scores.setdefault(update.index, []).extend(update.prompt_logprobs)
        for update in updates:
            if self.plan.echo and self._owes_echo(update):
                pieces.append(self.choices[update.index].echo(await self._echo(update.index)))
            self._take(update, pieces)

    def _owes_echo(self, update: Update) -> bool:
        choice = self.choices[update.index]
        brings_news = bool(update.tokens) or _ends_well(update)
        return brings_news and not choice.begun and not choice.ended

    def _take(self, update: Update, pieces: list[Piece]) -> None:
        choice = self.choices[update.index]
        if choice.ended:
            return
        error: RaycombError | None = None
        if update.finish_reason is not None and not _ends_well(update):
            error = update.error or RequestFailed("the server gave the request up")
            # what was generated before the failure still counts
            update = update._replace(finish_reason=None, error=None)
        if update.tokens or update.finish_reason is not None:
            self._count_prompt()
        num_tokens = choice.num_tokens
        piece = choice.take(update)
        self._meter.tokens(choice.index, choice.num_tokens - num_tokens)
        if piece is not None:
            pieces.append(piece)
        if piece is not None and piece.ending is not None:
            self._meter.ended(piece.ending)
            if update.finish_reason is None and self._generation is not None:
                self._generation.cancel([update.index])
        elif error is not None:
            raise error

    def stop(self) -> asyncio.Task[list[Update]] | None:
        """Cancel the generation unless all is over; returns the task that must still be awaited."""
        if self._generation is not None and not self.finished:
            self._generation.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
        return self._waiting

    def prompt_scores(self, index: int = 0) -> list[TokenLogprobs]:
        """One for each token of the prompt, the first without a log probability; none where they did not come."""
        scores = self._prompt_scores.get(index) or self._prompt_scores.get(0, [])
        if len(scores) == len(self.plan.prompt.ids) - 1:  # nothing precedes the first token, so it has no score
            return [TokenLogprobs(self.plan.prompt.ids[0], None), *scores]
        return scores

    def _count_prompt(self) -> None:
        if not self._prompt_counted:
            self._prompt_counted = True
            self._meter.prompt(len(self.plan.prompt.ids))

    async def _echo(self, index: int) -> Echo:
        scores = self.prompt_scores(index)
        size = max(4, SCORE_SIZE * self.plan.scores_echo) * len(self.plan.prompt.ids)
        return await self._threads.run_admitted(size, lambda: echo_of(self.plan, self._text, scores))


def _ends_well(update: Update) -> bool:
    return update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

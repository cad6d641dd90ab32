"""An offline batch: lines of prompts go to one engine, and an answer for each goes to the writer. No files, no flags.

What a line asks for and how its text is made are the HTTP endpoints': the same bodies, plans and choices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.answers.choice import Choice, Ending, ScoredToken
from cluster.answers.requests import text_rules
from cluster.language.text import TextModel
from cluster.offline.engine import OfflineEngine
from cluster.offline.files import Line, OrderedWriter, error_record
from cluster.offline.line_plans import LinePlans, told_alternatives
from cluster.routing.fleet import ServedModel
from planner.errors import InvalidRequest, RaycombError, RequestFailed, RequestRefused
from planner.request import Adapter, FinishReason, Request, Update


@dataclass(slots=True)
class Totals:
    """What a batch came to so far. Lines that got an error count as failed; their prompts count, what came of them
    does not. `first_failure`: what the first of them was told."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    first_failure: str | None = None


@dataclass(slots=True)
class _Grown:
    """One choice while it grows."""

    choice: Choice
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)
    ending: Ending | None = None


@dataclass(slots=True)
class _Open:
    """A line that was submitted and has no answer yet. `num_cached`: prompt tokens that needed no prefill."""

    line: Line
    grown: list[_Grown]
    scored: bool
    num_cached: int = 0


class Batch:
    """One run. Owner and only caller: the thread that owns the engine.

    `on_line` is called whenever a line has its answer, or its error.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        text: TextModel,
        writer: OrderedWriter,
        *,
        max_num_seqs: int,
        on_line: Callable[[], object],
        adapters: Sequence[Adapter] = (),
    ) -> None:
        """`adapters`: those that the engine has; a line's `model` may name one."""
        info = engine.info
        self.totals = Totals()
        self._engine = engine
        self._text = text
        self._writer = writer
        self._on_line = on_line
        model = ServedModel(
            name=info.name,
            created=int(time.time()),
            vocab_size=info.vocab_size,
            context=info.context,
            capacity=info.num_cells,
            max_num_seqs=max_num_seqs,
        )
        self._plans = LinePlans(text, model, adapters)
        self._open: dict[int, _Open] = {}

    def run(self, lines: Iterable[Line], max_in_flight: int) -> None:
        """Answer every line. Raises `Interrupted` when the engine was; what had its answer was written by then."""
        try:
            for news in self._engine.run(self._requests(lines), max_in_flight):
                entry = self._open.get(news.key)
                if entry is None:
                    continue  # the line was given up, or its choices ended before their sequences did
                if isinstance(news.update, RequestRefused):
                    self._fail(entry.line, news.update)
                else:
                    self._take(entry, news.update)
        finally:
            self._writer.write_rest()

    def _requests(self, lines: Iterable[Line]) -> Iterator[tuple[int, Request]]:
        for line in lines:
            try:
                if isinstance(line.body, InvalidRequest):
                    raise line.body
                plan, body = self._plans.plan(line.body), line.body
            except RequestRefused as refusal:
                self._fail(line, refusal)
                continue
            assert plan.request is not None, "without echo something is always generated"
            num_top = told_alternatives(body)
            scored = num_top is not None
            choices = [Choice(i, self._text.tokens, text_rules(body, num_top), scored=scored) for i in range(plan.n)]
            self._open[line.number] = _Open(line, list(map(_Grown, choices)), scored)
            self.totals.prompt_tokens += len(plan.prompt.ids)
            yield line.number, plan.request

    def _take(self, entry: _Open, update: Update) -> None:
        number = entry.line.number
        grown = entry.grown[update.index]
        entry.num_cached = max(entry.num_cached, update.num_cached_tokens)  # every update of the line says it again
        if grown.ending is not None:
            return
        if update.finish_reason in (FinishReason.FAILED, FinishReason.CANCELLED):
            self._engine.cancel(number)
            self._fail(entry.line, update.error or RequestFailed("the engine gave the request up"))
            return
        before = grown.choice.num_tokens
        piece = grown.choice.take(update)
        grown.token_ids += update.tokens[: grown.choice.num_tokens - before]
        if piece is None:
            return
        grown.text.append(piece.text)
        grown.scores += piece.scores
        grown.ending = piece.ending
        if piece.ending is not None and update.finish_reason is None:
            self._engine.cancel(number, [update.index])
        if all(one.ending is not None for one in entry.grown):
            self._complete(entry)

    def _complete(self, entry: _Open) -> None:
        del self._open[entry.line.number]
        self.totals.completed += 1
        self.totals.cached_prompt_tokens += entry.num_cached
        self.totals.generated_tokens += sum(len(grown.token_ids) for grown in entry.grown)
        self._writer.put(entry.line.number, [self._record(entry, grown) for grown in entry.grown])
        self._on_line()

    def _fail(self, line: Line, error: RaycombError) -> None:
        self._open.pop(line.number, None)
        self.totals.failed += 1
        self.totals.first_failure = self.totals.first_failure or f"{line.id}: {error.message}"
        self._writer.put(line.number, [error_record(line.id, error)])
        self._on_line()

    def _record(self, entry: _Open, grown: _Grown) -> dict[str, Any]:
        assert grown.ending is not None
        record: dict[str, Any] = {"id": entry.line.id}
        if len(entry.grown) > 1:
            record["index"] = grown.choice.index
        record |= {
            "text": "".join(grown.text),
            "token_ids": grown.token_ids,
            "finish_reason": grown.ending.value,
        }
        if entry.scored:
            record["logprobs"] = [self._score(scored) for scored in grown.scores]
        return record

    def _score(self, scored: ScoredToken) -> dict[str, Any]:
        logprobs = scored.logprobs
        return {
            "token_id": logprobs.token,
            "token": self._text.tokens.name(logprobs.token),
            "logprob": logprobs.logprob,
            "top": [[token, logprob] for token, logprob in logprobs.top],
        }

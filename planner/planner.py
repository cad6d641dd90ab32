"""The planner: what a worker runs next. It decides in integers and moves no bytes.

`plan` packs a step: one token of every decoding sequence first, in admission order, then chunks of prompts in
rotation. `commit` applies what came of it. Between the two a second step may be planned (`max_steps_in_flight`): its
decodes are fed on the device with tokens that the host has not seen, so a stop found at a commit costs the one token
of the later step, which is discarded; the cells of such a sequence go back when no step in flight holds them.

When cells run out, cached prefixes are evicted, then the newest sequence of the lowest class is preempted: it waits
again, keeps its tokens, and later either recomputes them or has their cells copied back from host memory. The oldest
always gets its cells, so all end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, KeysView
from dataclasses import dataclass
from typing import Final, NamedTuple

from planner.admission import check_request, check_room
from planner.blocks import ResidentBlocks
from planner.draft import pack
from planner.errors import RequestFailed, RequestRefused
from planner.families import Families
from planner.inspection import Inspection, inspect
from planner.limits import Limits, Snapshot
from planner.memory import Memory
from planner.metrics import Metrics
from planner.move import Move
from planner.outlook import Outlook
from planner.request import BASE_ROOT, CellArray, FinishReason, Request, TokenArray, TokenLogprobs, Update
from planner.schedule import Schedule
from planner.sequence import Sequence
from planner.step import Chunk, ChunkOutput, Step, StepResult, check_result

# Of all fields, in order: a call of the class itself takes half as long again, and there is one for every token.
_new_update: Final = Update._make


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step planned and not yet committed, and the sequences of its chunks."""

    step: Step
    sequences: tuple[Sequence, ...]


class Held(NamedTuple):
    """int64[n] tokens of a sequence and the int32[n] cells that hold them; read-only, until the next plan. `root`: of
    its request; the cells are of use below that root alone."""

    tokens: TokenArray
    cells: CellArray
    root: int


class Planner:
    """Owner of every sequence and cell of one worker. Only the engine's thread calls it; it never blocks.

    Each sequence of an accepted request gets exactly one update with a finish reason, from whichever call ends it.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.metrics = Metrics()
        self._memory = Memory(limits, self.metrics)
        self._schedule = Schedule(limits, self._memory, self.metrics)
        self._outlook = Outlook()
        self._families = Families(self._schedule, self._memory, self._outlook, self.metrics)
        self._in_flight: deque[_Flight] = deque()
        self._last_planned = 0
        self._last_committed = 0

    @property
    def has_work(self) -> bool:
        """Whether anything waits, runs, or is in flight. With nothing in flight, `plan` then has a step."""
        return self._schedule.busy or bool(self._in_flight)

    @property
    def live(self) -> KeysView[int]:
        """Ids of the requests that have not ended; the view follows them."""
        return self._families.ids

    @property
    def num_queued_tokens(self) -> int:
        """Tokens that are still to be prefilled, of waiting and running sequences."""
        return self._schedule.num_queued_tokens

    def tokens_before(self, request: Request) -> int:
        """Tokens to prefill before the first turn of a request that came now: an estimate, and rather too few."""
        return self._schedule.tokens_before(request)

    @property
    def blocks(self) -> ResidentBlocks:
        """Which prefixes are resident, by name; every other method may change it."""
        return self._memory.prefixes.blocks

    def submit(self, request: Request) -> int:
        """Accept a request; returns its id, which ascends from 1.

        Raises `InvalidRequest`, `ContextLengthExceeded` or `NeverFits` when it could never run, and `QueueFull` when
        `max_waiting` requests or `max_waiting_tokens` tokens wait already.
        """
        try:
            check_request(request, self.limits)
            check_room(request, len(self._schedule.waiting), self.num_queued_tokens, self.limits)
        except RequestRefused:
            self.metrics.num_requests_refused += 1
            raise
        return self._families.accept(request)

    def has_begun(self, request_id: int) -> bool:
        """Whether a live request has ever had a seat."""
        family = self._families.get(request_id)
        return family is not None and family.num_cached_tokens is not None

    def cancel(self, request_id: int, indices: Collection[int] | None = None) -> list[Update]:
        """End a request's sequences, or those of `indices`, and say so; nothing for what is unknown or has ended.

        Their cells are back at once, or else at the commit of the last step in flight that holds them.
        """
        family = self._families.get(request_id)
        if family is None:
            return []
        chosen = [index for index in family.indices if indices is None or index in indices]
        return self._families.end(family, FinishReason.CANCELLED, chosen)

    def fail(self, request_id: int, error: RequestFailed) -> list[Update]:
        """As `cancel` of a whole request, but its sequences end as FAILED with `error`."""
        family = self._families.get(request_id)
        if family is None:
            return []
        return self._families.end(family, FinishReason.FAILED, family.indices, error)

    def cancel_all(self) -> list[Update]:
        """End every sequence; steps in flight are still to be committed."""
        return self._families.end_all(FinishReason.CANCELLED)

    def fail_all(self, error: RequestFailed) -> list[Update]:
        """The executor is dead: end every sequence with `error`; forget the steps in flight and all cached cells."""
        for flight in self._in_flight:
            for sequence in flight.sequences:
                sequence.num_in_flight = 0
                self._families.take_back(sequence)
        self._in_flight.clear()
        updates = self._families.end_all(FinishReason.FAILED, error)
        self._memory.clear()
        return updates

    def plan(self) -> Step | None:
        """The next step; None when there is nothing to do, or nothing before the step in flight is committed."""
        if len(self._in_flight) >= self.limits.max_steps_in_flight:
            return None
        draft = self._schedule.draft(in_flight=bool(self._in_flight))
        if draft.must_commit or not draft.takes:
            return None
        self._last_planned += 1
        step = pack(draft, self._last_planned, self._memory, self.limits, self.metrics)
        self._schedule.advance(draft)
        self._in_flight.append(_Flight(step, tuple(draft.takes)))
        return step

    def take_moves(self) -> list[Move]:
        """Who got a seat or lost it since this was last asked, in order."""
        moves, self._schedule.moves = self._schedule.moves, []
        return moves

    def commit(self, step: Step, result: StepResult) -> list[Update]:
        """Apply the outcome of the oldest step in flight; at most one update a sequence.

        Raises ValueError, and nothing changed, when the step is another one or the result does not fit it.
        """
        if not self._in_flight or self._in_flight[0].step is not step:
            raise ValueError(f"step {step.number} is not the oldest in flight")
        check_result(step, result, self.limits.vocab_size)
        flight = self._in_flight.popleft()
        self._last_committed = step.number
        updates: list[Update] = []
        for sequence, chunk, outcome in zip(flight.sequences, step.chunks, result.outcomes, strict=True):
            sequence.num_in_flight -= 1
            if sequence.has_left:
                self._families.take_back(sequence)
            elif isinstance(outcome, RequestFailed):
                updates += self._families.fail(sequence, outcome)
            else:
                self._apply(sequence, chunk, outcome, updates)
        return updates

    def held(self, request_id: int, index: int = 0) -> Held | None:
        """What a running sequence has committed; None for one that waits, has ended or never was."""
        family = self._families.get(request_id)
        sequence = None if family is None else family.live.get(index)
        if sequence is None or sequence.cells_id is None or self._memory.is_returning(sequence):
            return None
        length = sequence.num_computed
        return Held(sequence.tokens.view(0, length), self._memory.cells(sequence)[:length], sequence.root)

    def receive(self, tokens: TokenArray, fill: Callable[[int, CellArray], None], root: int = BASE_ROOT) -> int:
        """Make int64[n] tokens resident below `root` whose keys and values come from elsewhere; a continuation of them
        then finds them as it finds any prefix.

        `fill(start, cells)` puts those of positions from `start` on into int32[n - start] cells; where it raises,
        nothing has changed. Returns how many positions came from elsewhere: 0, without a call of `fill`, where all are
        resident, or where there is no room for them or no prefix cache.
        """
        return self._memory.receive(tokens, fill, root)

    def snapshot(self) -> Snapshot:
        """The state between two calls; O(running sequences)."""
        table, schedule = self._memory.table, self._schedule
        return Snapshot(
            capacity=table.capacity,
            free_cells=table.free,
            owned_cells=table.owned,
            cached_cells=table.cached,
            num_running=schedule.num_running,
            num_waiting=len(schedule.waiting),
            queued_prefill_tokens=schedule.num_queued_tokens,
            step=self._last_committed,
            answer_tokens=self._outlook.num_tokens,
            ends_per_token=self._outlook.ends_per_token,
        )

    def inspect(self) -> Inspection:
        """Everything that it holds, sequence by sequence, in O(capacity); for people."""
        return inspect(self._families, self._memory.table)

    def check(self) -> None:
        """Verify every invariant, in O(capacity); for tests and debugging."""
        self._memory.check(self._schedule.sequences)
        self._schedule.check()
        self._families.check()

    def _apply(self, sequence: Sequence, chunk: Chunk, output: ChunkOutput, updates: list[Update]) -> None:
        """Take what a chunk gave, and add the sequence's news, and that of those it ends, to `updates`."""
        sequence.num_computed = chunk.start + chunk.length
        if chunk.start < sequence.num_prompt:
            updates += self._apply_prompt(sequence, chunk, output)
        elif output.token is not None and sequence.num_computed >= sequence.tokens.length:  # else it was forced before
            updates.append(self._draw(sequence, output.token, output, ()))

    def _apply_prompt(self, sequence: Sequence, chunk: Chunk, output: ChunkOutput) -> list[Update]:
        """What a committed part of a prompt means: news of the prompt itself, a prefix to share, the first token, and
        the forks that waited for it."""
        news: tuple[TokenLogprobs, ...] = ()
        forked: list[Update] = []
        if output.pooled is not None:
            sequence.pool(chunk.start, output.pooled)
        if sequence.family.owes_prompt_logprobs(sequence):
            news = sequence.family.take_prompt_logprobs(chunk.start, output.prompt_logprobs)
        self.metrics.num_prompt_tokens_computed += min(sequence.num_computed, sequence.num_prompt) - chunk.start
        if sequence.num_computed >= sequence.num_prompt:
            self._memory.publish(sequence, sequence.num_prompt)
            forked = self._families.fork(sequence)
        if sequence.finish_reason is not None:  # it computed on for the others
            return forked
        if output.token is not None:
            return [self._draw(sequence, output.token, output, news), *forked]
        return [*self._tell_prompt(sequence, news), *forked]

    def _draw(self, sequence: Sequence, token: int, output: ChunkOutput, news: tuple[TokenLogprobs, ...]) -> Update:
        """The sequence has one more token and what has to follow it, one of which may be its last; `news` of its prompt
        are told with it."""
        family = sequence.family
        sequence.tokens.append(token)
        self._outlook.draw(sequence.request)
        self.metrics.num_tokens_generated += 1
        forced: tuple[int, ...] = ()
        reason = sequence.reason_to_end(token)
        if output.forced and reason is None:
            reason, forced = self._follow(sequence, output.forced)
        if reason is not None:
            self._families.close(family, sequence.index, reason)
        logprobs = () if output.logprobs is None else (output.logprobs,)
        cached = family.num_cached_tokens or 0
        return _new_update(
            (family.request_id, sequence.index, (token, *forced), logprobs, news, cached, reason, None, ())
        )

    def _follow(self, sequence: Sequence, forced: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Take what has to follow, to be fed at once: why the sequence ends, if it does, and what it took."""
        reason, taken = sequence.follow(forced[: self.limits.most_forced])
        for _ in taken:
            self._outlook.draw(sequence.request)
        self.metrics.num_tokens_generated += len(taken)
        self.metrics.num_tokens_forced += len(taken)
        self._schedule.feed_at_once(sequence)
        return reason, taken

    def _tell_prompt(self, sequence: Sequence, news: tuple[TokenLogprobs, ...]) -> list[Update]:
        """Of a prompt that no token followed; where none is to follow, the sequence ends once the prompt is whole."""
        family, reason = sequence.family, None
        if sequence.request.max_tokens == 0 and sequence.num_computed == sequence.num_prompt:
            reason = FinishReason.LENGTH
            self._families.close(family, sequence.index, reason)
        elif not news:
            return []
        vector = () if reason is None else sequence.vector
        cached = family.num_cached_tokens or 0
        return [Update(family.request_id, sequence.index, (), (), news, cached, reason, vector=vector)]

"""A sequence and its family: what the planner knows of an accepted request while it lives."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from planner.growable import Growable
from planner.request import FinishReason, Pooling, Request, SamplingParams, TokenLogprobs, Vector, sequence_seed
from planner.swap import HostCopy


class ClassKey(NamedTuple):
    """The lower class goes first: by priority, and what has begun elsewhere before what is new."""

    priority: int
    is_new: bool


class Account(NamedTuple):
    """Whose tokens they are: tenants share within a class."""

    class_key: ClassKey
    tenant: str


def account_of(request: Request) -> Account:
    return Account(ClassKey(request.priority, not request.num_generated), request.tenant)


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer in the making. Owner: the planner.

    `tokens` int64: prompt and what was generated, as far as the host knows. The last sampled token is pending: it is
    in `tokens` but not in a cell until it is fed. Of the positions, [0, num_computed) are committed to cells and
    [0, num_planned) are in a committed or planned step. `cells_id` names the cell list while the sequence runs.
    `max_length`: tokens of its prompt and of its whole budget. `reads_tokens`: a draw reads the tokens before it, and
    with `needs_history` it waits until the host knows all of them. `host_copy`: of the cells it had when it was
    preempted, until they are copied back. `pooled`: of the positions that are committed, where a vector is wanted.
    Fields without a default are set once.
    """

    family: Family
    request: Request
    index: int
    num_prompt: int
    max_length: int
    tokens: Growable[np.int64]
    sampling: SamplingParams
    needs_history: bool
    reads_tokens: bool
    cells_id: int | None = None
    num_computed: int = 0
    num_planned: int = 0
    num_in_flight: int = 0
    finish_reason: FinishReason | None = None
    host_copy: HostCopy | None = None
    pooled: Vector | None = None

    @property
    def order(self) -> tuple[int, bool, int, int]:
        """Who goes first: the lower class, then earlier arrival, then lower index."""
        return *self.family.account.class_key, self.family.request_id, self.index

    @property
    def root(self) -> int:
        """The name of the empty prefix that it grows from."""
        return self.request.root

    @property
    def has_left(self) -> bool:
        """Whether it has ended, and nobody waits for the prompt that it computes."""
        return self.finish_reason is not None and self.family.leader is not self

    @property
    def num_slots(self) -> int:
        """Running sequences that this one counts for: itself, and those that will fork from it."""
        return 1 + (len(self.family.unforked) if self.family.leader is self else 0)

    @property
    def num_to_feed(self) -> int:
        """Known tokens that no step has fed yet."""
        return len(self.tokens) - self.num_planned

    @property
    def num_to_prefill(self) -> int:
        """Tokens to prefill once it is admitted, resident prefixes not considered."""
        return len(self.tokens) - (0 if self.host_copy is None else self.host_copy.end)

    @property
    def can_decode(self) -> bool:
        """Whether one more token can be planned for a sequence whose prompt is wholly planned.

        Either its last token is known, or a step in flight samples it: then only when no draw reads it, and when that
        token is not the last of the budget anyway.
        """
        if self.finish_reason is not None:
            return False
        num_known = self.tokens.length
        if num_known > self.num_planned:
            return True
        return num_known + 1 < self.max_length and not self.needs_history

    def reason_to_end(self, token: int) -> FinishReason | None:
        """Why the sequence ends with the token just appended, if it does. A stop token wins over the budget.

        Before `min_tokens` one is drawn only where a grammar leaves nothing else, and then it ends the sequence.
        """
        request, num_known = self.request, self.tokens.length
        if token in request.stop_token_ids:
            early = num_known - self.num_prompt <= request.min_tokens and self.sampling.grammar is None
            if not early:
                return FinishReason.STOP
        return FinishReason.LENGTH if num_known >= self.max_length else None

    def follow(self, forced: tuple[int, ...]) -> tuple[FinishReason | None, tuple[int, ...]]:
        """Append what has to follow the last token, up to one that ends the sequence: why that is, and what was
        appended."""
        for count, token in enumerate(forced, 1):
            self.tokens.append(token)
            reason = self.reason_to_end(token)
            if reason is not None:
                return reason, forced[:count]
        return None, forced

    def pool(self, start: int, pooled: Vector) -> None:
        """Take what a committed chunk from position `start` on gave; one from 0 on begins anew."""
        adds = self.pooled is not None and start > 0 and self.request.pooling is Pooling.MEAN
        self.pooled = self.pooled + pooled if adds and self.pooled is not None else pooled

    @property
    def vector(self) -> tuple[float, ...]:
        """Of the whole prompt, once it is committed; empty where none is wanted."""
        if self.pooled is None:
            return ()
        divisor = self.num_prompt if self.request.pooling is Pooling.MEAN else 1
        return tuple((self.pooled / np.float32(divisor)).tolist())

    def start(self, cells_id: int, num_cached: int, num_returning: int = 0) -> None:
        """Begin to run on a cell list that already holds `num_cached` tokens. The next step fills `num_returning` cells
        more: whether that went well is known once a chunk behind them is committed, and they with it."""
        self.cells_id = cells_id
        self.num_computed, self.num_planned = num_cached, num_cached + num_returning


@dataclass(slots=True, eq=False)
class Family:
    """The live sequences of one request.

    Index 0 leads: it computes the prompt, and the `unforked` indices fork from it when the prompt is committed.
    `leader` is that sequence while others wait for it, and it computes on for their sake even when its own answer has
    already ended. `live` has the sequences that still owe their terminal update, by index. `num_cached_tokens` is what
    the prefix index knew of the prompt when it was first admitted; None before.
    """

    request_id: int
    request: Request
    live: dict[int, Sequence] = field(default_factory=dict)
    unforked: set[int] = field(default_factory=set)
    leader: Sequence | None = None
    num_cached_tokens: int | None = None
    num_prompt_logprobs: int = 0
    account: Account = field(init=False)

    def __post_init__(self) -> None:
        self.account = account_of(self.request)

    @property
    def indices(self) -> list[int]:
        """Indices that still owe their terminal update, ascending."""
        return sorted({*self.live, *self.unforked})

    def num_left(self, index: int) -> int:
        """Tokens that a live answer may still draw."""
        sequence = self.live.get(index)
        num_drawn = 0 if sequence is None else len(sequence.tokens) - sequence.num_prompt
        return self.request.max_tokens - num_drawn

    def spawn(self, index: int) -> Sequence:
        """The index-th sequence, with the prompt as its tokens and a seed of its own."""
        sampling, num_prompt = self.request.sampling, len(self.request.prompt)
        sequence = Sequence(
            family=self,
            request=self.request,
            index=index,
            num_prompt=num_prompt,
            max_length=num_prompt + self.request.max_tokens,
            tokens=Growable(np.asarray(self.request.prompt, np.int64)),
            sampling=replace(sampling, seed=sequence_seed(sampling.seed, index)),
            needs_history=sampling.needs_history,
            reads_tokens=sampling.needs_history or sampling.grammar is not None,
        )
        self.live[index] = sequence
        return sequence

    def needs_every_row(self, sequence: Sequence) -> bool:
        """Whether the sequence cannot start on a resident prefix, since its forward has something to tell."""
        return self.request.pooling is Pooling.MEAN or self.owes_prompt_logprobs(sequence)

    def owes_prompt_logprobs(self, sequence: Sequence) -> bool:
        """Whether prompt log probabilities are still to be computed, by this sequence."""
        return (
            self.request.prompt_logprobs
            and sequence.index == 0
            and sequence.finish_reason is None
            and self.num_prompt_logprobs < len(self.request.prompt)
        )

    def take_prompt_logprobs(self, start: int, computed: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """What is news of the prompt, given those of positions start + 1 and on; each position is delivered once."""
        if start == 0:
            computed = (TokenLogprobs(int(self.request.prompt[0]), None), *computed)
        else:
            start += 1
        news = computed[max(0, self.num_prompt_logprobs - start) :]
        self.num_prompt_logprobs += len(news)
        return news


def accept(request_id: int, request: Request) -> Family:
    """The family of a request just accepted; its leader is ready to wait for cells."""
    family = Family(request_id, request, unforked=set(range(1, request.n)))
    leader = family.spawn(0)
    if family.unforked:
        family.leader = leader
    return family

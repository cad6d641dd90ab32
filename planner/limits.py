"""The numbers that a planner keeps to, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.errors import InvalidConfiguration

# Blocks are what host memory is given out in and what one transfer over the bus carries: large enough for its full
# speed, small enough that a sequence's last block wastes little.
SWAP_BLOCK_CELLS = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program and its operator allow.

    * `capacity`: cells of the pool. `context`: most positions of one sequence. `vocab_size`: token ids are below it.
    * `max_prefill_tokens` (W) and `min_prefill_tokens` (m): widest and narrowest prefill forward, 2 <= m <= W.
    * `widths`: decode widths that the program has, ascending, starting at 1.
    * `max_num_seqs`: sequences that run at once. `max_batched_tokens`: tokens of one step.
    * `prefill_chunk_tokens`: most prompt tokens of one sequence before the next one has its turn.
    * `max_waiting`: requests that may wait. `max_waiting_tokens`: tokens that may wait to be prefilled; one request is
      taken beyond that when none waits. `max_steps_in_flight`: steps planned and not yet committed, 1 or 2.
    * `swap_blocks`: blocks of host memory for preempted sequences, of `swap_block_cells` cells each; without any they
      recompute. `min_swapped_cells`: a sequence that holds fewer alone recomputes anyway.
    * `pools`: whether the program gives vectors of prompts.
    * `tenant_weights`: what tenants get in proportion to each other; those that are not named weigh 1.
    """

    capacity: int
    context: int
    vocab_size: int
    max_prefill_tokens: int = 512
    min_prefill_tokens: int = 2
    widths: tuple[int, ...] = (1,)
    max_num_seqs: int = 256
    max_batched_tokens: int = 512
    prefill_chunk_tokens: int = 256
    max_waiting: int = 4096
    max_waiting_tokens: int = 2**24
    max_steps_in_flight: int = 1
    prefix_caching: bool = True
    swap_blocks: int = 0
    swap_block_cells: int = SWAP_BLOCK_CELLS
    min_swapped_cells: int = 64
    pools: bool = False
    tenant_weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (
            "capacity",
            "context",
            "vocab_size",
            "max_num_seqs",
            "prefill_chunk_tokens",
            "max_waiting",
            "max_waiting_tokens",
            "swap_block_cells",
            "min_swapped_cells",
        ):
            if getattr(self, name) < 1:
                raise InvalidConfiguration(f"{name} must be at least 1, not {getattr(self, name)}", param=name)
        if self.swap_blocks < 0:
            raise InvalidConfiguration(f"swap_blocks must be at least 0, not {self.swap_blocks}", param="swap_blocks")
        w, m = self.max_prefill_tokens, self.min_prefill_tokens
        if not 2 <= m <= w:
            raise InvalidConfiguration(
                f"min_prefill_tokens must lie in [2, max_prefill_tokens = {w}], not {m}", param="min_prefill_tokens"
            )
        if not self.widths or self.widths[0] != 1 or list(self.widths) != sorted(set(self.widths)):
            raise InvalidConfiguration(f"decode widths must ascend from 1, not {self.widths}", param="widths")
        if self.max_batched_tokens <= self.max_num_seqs:
            raise InvalidConfiguration(
                f"max_batched_tokens ({self.max_batched_tokens}) must exceed max_num_seqs ({self.max_num_seqs}), "
                "else decodes could starve prefills for ever",
                param="max_batched_tokens",
            )
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise InvalidConfiguration(
                    f"the weight of tenant {tenant!r} must be a number above 0, not {weight}", param="tenant_weights"
                )
        if self.max_steps_in_flight not in (1, 2):
            raise InvalidConfiguration(
                f"max_steps_in_flight must be 1 or 2, not {self.max_steps_in_flight}", param="max_steps_in_flight"
            )

    @property
    def most_forced(self) -> int:
        """Tokens of one step beyond one for each sequence that may be fed because a grammar forces them: prompts have
        the other half of what decodes leave."""
        return (self.max_batched_tokens - self.max_num_seqs) // 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's state after a step, for routing and metrics. free + owned + cached cells = capacity, always.

    `queue_tokens_per_s` is how fast the queue of prefill tokens moves, where the worker has measured it: the planner,
    which has no clock, leaves it to the engine. `answer_tokens` are expected still to be drawn for all live sequences,
    and `ends_per_token` is the share of tokens that end an answer before its budget (`planner.outlook`).
    """

    capacity: int
    free_cells: int
    owned_cells: int
    cached_cells: int
    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    step: int
    queue_tokens_per_s: float | None = None
    answer_tokens: int = 0
    ends_per_token: float = 0.0

"""A step being decided: who takes how many tokens. Nothing is claimed before the draft is packed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from planner.cells import CellTable
from planner.limits import Limits
from planner.memory import Memory
from planner.metrics import Metrics
from planner.request import Pooling, TokenArray
from planner.sequence import Sequence
from planner.slices import plan_slices
from planner.step import Chunk, Step

_NOTHING: frozenset[int] = frozenset()
# Of all fields, in order: a call of the class itself takes half as long again, and there is one for every row.
_new_chunk: Final = Chunk._make


@dataclass(slots=True)
class Draft:
    """Tokens of the step to be, by sequence and in packing order; each of them needs one cell.

    `may_preempt`: whether a sequence may lose its cells for the sake of this step. `must_commit`: one would have to,
    and may not, so this draft is void until the step in flight is committed.
    """

    may_preempt: bool
    takes: dict[Sequence, int] = field(default_factory=dict)
    num_tokens: int = 0
    must_commit: bool = False

    def take(self, sequence: Sequence, length: int) -> None:
        self.takes[sequence] = self.takes.get(sequence, 0) + length
        self.num_tokens += length

    def take_one_each(self, sequences: list[Sequence]) -> None:
        """The same as `take` of one token for each of these, none of which has taken any."""
        self.takes |= dict.fromkeys(sequences, 1)
        self.num_tokens += len(sequences)

    def drop(self, sequence: Sequence) -> None:
        self.num_tokens -= self.takes.pop(sequence, 0)


def pack(draft: Draft, number: int, memory: Memory, limits: Limits, metrics: Metrics) -> Step:
    """Claim the cells of a draft and make it a step; its sequences count as planned up to there."""
    memory.claim(draft.takes)
    chunks = tuple([_chunk(sequence, length, memory.table) for sequence, length in draft.takes.items()])
    lone = draft.num_tokens == len(chunks) and all(chunk.samples for chunk in chunks)
    widths = limits.widths if lone else (1,)
    slices = plan_slices(draft.num_tokens, limits.max_prefill_tokens, limits.min_prefill_tokens, widths)
    metrics.count_step(slices, widths)
    swaps_out, swaps_in = memory.take_swaps()
    return Step(number, chunks, tuple(slices), memory.take_dropped(), swaps_out, swaps_in)


def _chunk(sequence: Sequence, length: int, table: CellTable) -> Chunk:
    """The next `length` tokens of a sequence, which count as planned from here on."""
    start = sequence.num_planned
    end = sequence.num_planned = start + length
    sequence.num_in_flight += 1
    if start >= sequence.num_prompt:
        return _own_chunk(sequence, start, length, table)
    request, tokens, num_prompt = sequence.request, sequence.tokens, sequence.num_prompt
    samples = end >= tokens.length and request.max_tokens > 0 and sequence.finish_reason is None
    assert sequence.cells_id is not None
    return Chunk(
        sequence_id=sequence.cells_id,
        start=start,
        length=length,
        cells=table.cells(sequence.cells_id),
        tokens=tokens.view(start, end),
        samples=samples,
        sampling=sequence.sampling,
        prompt_targets=_targets(sequence, start, end) if start + 1 < num_prompt else None,
        history=tokens.view(0, end) if samples and sequence.reads_tokens else None,
        num_prompt=num_prompt - request.num_generated,
        masked=request.stop_token_ids if samples and end - num_prompt < request.min_tokens else _NOTHING,
        pooling=request.pooling if end == num_prompt or request.pooling is Pooling.MEAN else None,
        adapter=request.adapter,
    )


def _own_chunk(sequence: Sequence, start: int, length: int, table: CellTable) -> Chunk:
    """Of tokens behind the prompt: one that decodes, as nearly all chunks do, or those that are computed again."""
    request, tokens, num_prompt = sequence.request, sequence.tokens, sequence.num_prompt
    end, num_known = start + length, tokens.length
    samples = end >= num_known
    assert sequence.cells_id is not None
    return _new_chunk(
        (
            sequence.cells_id,
            start,
            length,
            table.cells(sequence.cells_id),
            tokens.view(start, end) if start < num_known else None,
            samples,
            sequence.sampling,
            None,
            tokens.view(0, end) if samples and sequence.reads_tokens else None,
            num_prompt - request.num_generated,
            request.stop_token_ids if samples and end - num_prompt < request.min_tokens else _NOTHING,
            None,
            request.adapter,
        )
    )


def _targets(sequence: Sequence, start: int, end: int) -> TokenArray | None:
    """Prompt tokens whose log probabilities positions [start, end) give, where they are wanted."""
    if not sequence.family.owes_prompt_logprobs(sequence):
        return None
    return sequence.tokens.view(start + 1, min(end + 1, sequence.num_prompt))

"""A step: what the planner hands to the executor, and what comes back. Values only.

The packed token axis of a step is its chunks laid end to end; slices cut that axis into forwards. A chunk may be cut
by a slice boundary, and a slice may hold many chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from planner.errors import RequestFailed
from planner.request import Adapter, CellArray, Pooling, SamplingParams, TokenArray, TokenLogprobs, Vector
from planner.slices import Slice

if TYPE_CHECKING:
    from collections.abc import Sequence


class Chunk(NamedTuple):
    """One sequence's consecutive tokens in a step. A sequence has at most one chunk in a step. (One is made for each
    sequence and step: a named tuple takes half the time of a frozen dataclass.)

    * `tokens` int64[length], or None for a lone decode token that the step before this one samples and that never
      visited the host: the executor feeds its own last sample of `sequence_id`.
    * `start`: position of the first token; position i of the sequence lives in cell `cells[i]`.
    * `cells` int32[start + length], read-only view: the sequence's cells up to and including this chunk.
    * `samples`: whether a token is drawn from the last row, with `sampling` and the draw keyed by position
      `start + length`.
    * `prompt_targets` int64[<= length], or None: log probabilities wanted for these tokens, row by row.
    * `history` int64[start + length], read-only view of all tokens, or None where the draw does not need it; the
      first `num_prompt` of them are the prompt. Where only a grammar needs it, a token that the host does not know yet
      is missing at its end.
    * `masked` ids that may not be drawn here (stop tokens before `min_tokens`).
    * `pooling`: wanted is the hidden state of the last row (LAST), or the sum of those of all rows (MEAN), each behind
      the last norm.
    * `adapter`: what is computed beside the model's own matrices.
    """

    sequence_id: int
    start: int
    length: int
    cells: CellArray
    tokens: TokenArray | None
    samples: bool
    sampling: SamplingParams
    prompt_targets: TokenArray | None = None
    history: TokenArray | None = None
    num_prompt: int = 0
    masked: frozenset[int] = frozenset()
    pooling: Pooling | None = None
    adapter: Adapter | None = None


class SwapOut(NamedTuple):
    """Cells int32[n] to copy to host memory, in order, filling one block of it after another: int32[blocks]."""

    cells: CellArray
    blocks: CellArray


class SwapIn(NamedTuple):
    """Blocks to copy back, in order, into cells int32[n] of a sequence; the last block may be filled in part."""

    sequence_id: int
    blocks: CellArray
    cells: CellArray


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the engine. `dropped` names sequences whose cell list is no longer what an executor may have kept
    of it (ended, preempted or rewound since the step before).

    Before anything else, `swaps_out` are copied and then `swaps_in`, in order: cells that are copied out may be
    written in the same step, and blocks that were copied back may be filled by a later one.
    """

    number: int
    chunks: tuple[Chunk, ...]
    slices: tuple[Slice, ...]
    dropped: tuple[int, ...] = ()
    swaps_out: tuple[SwapOut, ...] = ()
    swaps_in: tuple[SwapIn, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


class ChunkOutput(NamedTuple):
    """What one chunk gave. `token` is None iff the chunk did not sample. `logprobs` only where asked for; `pooled`
    float32[hidden size] iff the chunk pools. `forced`: what has to follow `token`, as far as the executor knows, since
    the answer's grammar leaves no choice there."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: Vector | None = None
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of a step: one entry a chunk, in order. A chunk that any failed forward held has that forward's error
    instead of an output; an executor does not run later slices of such a chunk for its sake."""

    outcomes: Sequence[ChunkOutput | RequestFailed]


def check_result(step: Step, result: StepResult, vocab_size: int) -> None:
    """Raise ValueError unless there is an outcome a chunk, and each output holds what its chunk asked for."""
    if len(result.outcomes) != len(step.chunks):
        raise ValueError(f"step {step.number} has {len(step.chunks)} chunks and {len(result.outcomes)} outcomes")
    for chunk, outcome in zip(step.chunks, result.outcomes, strict=True):
        if isinstance(outcome, RequestFailed):
            continue
        token = outcome.token
        if (token is not None) != chunk.samples:
            raise ValueError(
                f"sequence {chunk.sequence_id} of step {step.number} "
                f"{'samples' if chunk.samples else 'does not sample'}, and has {token}"
            )
        if token is not None and not 0 <= token < vocab_size:
            raise ValueError(
                f"sequence {chunk.sequence_id} of step {step.number} has token id {token}, "
                f"and the vocabulary is [0, {vocab_size})"
            )
        if outcome.forced:
            _check_forced(chunk, outcome, vocab_size)
        if (outcome.pooled is not None) != (chunk.pooling is not None):
            raise ValueError(f"sequence {chunk.sequence_id} of step {step.number} was pooled unasked, or was not")
        num_targets = 0 if chunk.prompt_targets is None else len(chunk.prompt_targets)
        if len(outcome.prompt_logprobs) != num_targets:
            raise ValueError(
                f"sequence {chunk.sequence_id} of step {step.number} has {len(outcome.prompt_logprobs)} "
                f"of {num_targets} prompt log probabilities"
            )


def _check_forced(chunk: Chunk, outcome: ChunkOutput, vocab_size: int) -> None:
    if outcome.token is None or not chunk.sampling.may_be_forced:
        raise ValueError(f"sequence {chunk.sequence_id} draws all of its tokens, and was told of forced ones")
    if not all(0 <= token < vocab_size for token in outcome.forced):
        raise ValueError(
            f"sequence {chunk.sequence_id} has the forced token ids {outcome.forced}, "
            f"and the vocabulary is [0, {vocab_size})"
        )

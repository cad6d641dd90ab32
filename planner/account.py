"""Why a step looks as it does, in words with numbers: for people who look at a worker, or at a recorded step log."""

from __future__ import annotations

from dataclasses import dataclass

from planner.limits import Limits
from planner.slices import Method, Slice, decode_width
from planner.step import Chunk, Step


@dataclass(frozen=True, slots=True)
class ChunkAccount:
    """`start` and `length` in tokens of the sequence; `sequence` as in `planner.inspection`."""

    sequence: int
    start: int
    length: int
    samples: bool
    why: str


@dataclass(frozen=True, slots=True)
class SliceAccount:
    """`offset` and `length` in packed tokens; the forward computes `num_padded` rows for nobody."""

    offset: int
    length: int
    method: str
    width: int
    num_padded: int
    why: str


@dataclass(frozen=True, slots=True)
class StepAccount:
    """`swapped_out` and `swapped_in`: cells that go to host memory before the step, and that come back."""

    number: int
    num_tokens: int
    chunks: tuple[ChunkAccount, ...]
    slices: tuple[SliceAccount, ...]
    swapped_out: int
    swapped_in: int


def account_for(step: Step, limits: Limits) -> StepAccount:
    """`limits` are those that it was planned with."""
    is_lone = step.num_tokens == len(step.chunks) and all(chunk.samples for chunk in step.chunks)
    return StepAccount(
        number=step.number,
        num_tokens=step.num_tokens,
        chunks=tuple(_account_for_chunk(chunk) for chunk in step.chunks),
        slices=tuple(_account_for_slice(piece, limits, is_lone=is_lone) for piece in step.slices),
        swapped_out=sum(len(swap.cells) for swap in step.swaps_out),
        swapped_in=sum(len(swap.cells) for swap in step.swaps_in),
    )


def _account_for_chunk(chunk: Chunk) -> ChunkAccount:
    end = chunk.start + chunk.length
    if chunk.start >= chunk.num_prompt and chunk.length == 1:
        why = "decodes: one token a step"
    elif chunk.start >= chunk.num_prompt:
        why = f"computes {chunk.length} of its own tokens at once: its grammar forced them, or it had lost their cells"
    elif end < chunk.num_prompt:
        why = (
            f"prefills {chunk.length} of {chunk.num_prompt} prompt tokens; {chunk.num_prompt - end} are left for later"
        )
    elif chunk.start == 0:
        why = f"prefills its whole prompt of {chunk.num_prompt} tokens"
    else:
        why = f"prefills the last {chunk.length} of {chunk.num_prompt} prompt tokens; {chunk.start} were there"
    return ChunkAccount(chunk.sequence_id, chunk.start, chunk.length, chunk.samples, why)


def _account_for_slice(piece: Slice, limits: Limits, *, is_lone: bool) -> SliceAccount:
    w, m = limits.max_prefill_tokens, limits.min_prefill_tokens
    if piece.method is Method.PREFILL:
        why = f"one prefill: {piece.length} tokens lie in [m = {m}, W = {w}]"
        return SliceAccount(piece.offset, piece.length, piece.method.value, piece.length, 0, why)
    width = decode_width(piece.length, limits.widths if is_lone else (1,))
    padded = width - piece.length
    if is_lone:
        why = f"lone decodes: {width} is the narrowest decode width that holds {piece.length}"
        if padded:
            why += f", so {padded} rows hold no token"
    elif piece.length < m:
        why = f"one decode: what is left here is narrower than the narrowest prefill, m = {m}"
    else:
        why = "one decode"
    return SliceAccount(piece.offset, piece.length, piece.method.value, width, padded, why)

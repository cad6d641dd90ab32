"""Cuts a step's packed token axis into forwards, and selects the rows whose logits are computed.

Pure integers: it knows neither sequences nor tensors. The rule is that of ExecuTorch's batching executor, whose one
decode width of a single token is here a ladder of widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from planner.errors import InvalidConfiguration


class Method(Enum):
    """A program's two methods."""

    DECODE = "decode"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class Slice:
    """Packed tokens [offset, offset + length) that one forward runs by `method`."""

    offset: int
    length: int
    method: Method


@dataclass(frozen=True, slots=True)
class SelectedRows:
    """Rows of one forward whose logits are wanted.

    * `selector`: row indices relative to the slice's start; never empty, since a program computes at least one row.
    * `chunks`: for each wanted row in order, the index of its chunk in the step. Selector rows past `len(chunks)` are
      computed and read by nobody.
    """

    selector: tuple[int, ...]
    chunks: tuple[int, ...]


def plan_slices(
    num_tokens: int,
    max_prefill_tokens: int,
    min_prefill_tokens: int = 2,
    widths: Sequence[int] = (1,),
) -> list[Slice]:
    """Cut `num_tokens` packed tokens into forwards, in order and without gaps; none for `num_tokens` <= 0.

    Each cut is as wide as W = `max_prefill_tokens` allows. What the widest decode holds runs as one decode (the
    executor pads it to `decode_width`); what is at least m = `min_prefill_tokens` wide runs as one prefill; the rest
    runs as decodes of at most the widest width. A ladder above (1,) is only for steps whose every token is the lone
    token of its sequence: tokens of one sequence must not share a decode.

    Raises `InvalidConfiguration` when W is not positive.
    """
    if max_prefill_tokens <= 0:
        raise InvalidConfiguration(
            f"max_prefill_tokens must be positive, not {max_prefill_tokens}", param="max_prefill_tokens"
        )
    widest_decode = widths[-1]
    slices: list[Slice] = []
    offset = 0
    while offset < num_tokens:
        length = min(max_prefill_tokens, num_tokens - offset)
        if widest_decode < length and min_prefill_tokens <= length:
            slices.append(Slice(offset, length, Method.PREFILL))
        else:
            end = offset + length
            slices.extend(
                Slice(at, min(widest_decode, end - at), Method.DECODE) for at in range(offset, end, widest_decode)
            )
        offset += length
    return slices


def decode_width(length: int, widths: Sequence[int]) -> int:
    """The smallest decode width that holds `length` tokens. Raises ValueError when none does."""
    for width in widths:
        if length <= width:
            return width
    raise ValueError(f"no decode width of {tuple(widths)} holds {length} tokens")


def select_rows(logit_indices: Sequence[int | None], offset: int, length: int) -> SelectedRows:
    """The rows wanted from the slice [offset, offset + length).

    `logit_indices` has one entry a chunk: the packed index of the token whose logits it wants, or None. A slice of
    which nothing is wanted selects its last row, for nobody.
    """
    wanted = [
        (chunk, index - offset)
        for chunk, index in enumerate(logit_indices)
        if index is not None and offset <= index < offset + length
    ]
    selector = tuple(row for _, row in wanted) or (length - 1,)
    return SelectedRows(selector, tuple(chunk for chunk, _ in wanted))


def pad_selector(selector: Sequence[int], min_rows: int) -> tuple[int, ...]:
    """`selector`, its last row repeated until there are `min_rows`; a longer one is left as it is."""
    return (*selector, *[selector[-1]] * (min_rows - len(selector)))

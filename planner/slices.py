"""Cuts a step's packed token axis into forwards, and selects the rows whose logits are computed."""

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


def plan_slices(
    num_tokens: int,
    max_prefill_tokens: int,
    min_prefill_tokens: int = 2,
    widths: Sequence[int] = (1,),
) -> list[Slice]:
    raise NotImplementedError

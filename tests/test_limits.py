"""Limits contradict themselves at once or never (statement 9; the scheduler's refusals of statement 54, adapted)."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import InvalidConfiguration
from planner.limits import Limits


def limits(**changes: Any) -> Limits:
    return Limits(**({"capacity": 64, "context": 64, "vocab_size": 8, "max_prefill_tokens": 8} | changes))


@pytest.mark.parametrize(
    "name",
    ["capacity", "context", "vocab_size", "max_num_seqs", "prefill_chunk_tokens", "max_waiting", "max_waiting_tokens"],
)
def test_nothing_can_be_limited_to_zero(name: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"{name} must be at least 1, not 0") as refusal:
        limits(**{name: 0})
    assert refusal.value.param == name


@pytest.mark.parametrize("narrowest", [1, 9])
def test_the_narrowest_prefill_lies_between_two_and_the_widest(narrowest: int) -> None:
    with pytest.raises(InvalidConfiguration, match=rf"must lie in \[2, max_prefill_tokens = 8\], not {narrowest}"):
        limits(min_prefill_tokens=narrowest)


@pytest.mark.parametrize("narrowest", [2, 8])
def test_the_narrowest_prefill_may_be_two_or_the_widest(narrowest: int) -> None:
    assert limits(min_prefill_tokens=narrowest).min_prefill_tokens == narrowest


def test_the_narrowest_prefill_is_two_where_the_program_does_not_say() -> None:
    assert limits().min_prefill_tokens == 2


@pytest.mark.parametrize("widths", [(), (2, 4), (1, 4, 2), (1, 2, 2)])
def test_decode_widths_ascend_from_one(widths: tuple[int, ...]) -> None:
    with pytest.raises(InvalidConfiguration, match="decode widths must ascend from 1"):
        limits(widths=widths)


@pytest.mark.parametrize(("tokens", "sequences"), [(32, 32), (31, 32)])
def test_decodes_may_not_fill_a_whole_step(tokens: int, sequences: int) -> None:
    """The reference wants room for a whole prefill chunk beside the decodes (288 = 32 + 256, not 287). Our chunks are
    cut to the budget, so room for one token is enough for prefills not to starve."""
    with pytest.raises(InvalidConfiguration, match=rf"max_batched_tokens \({tokens}\) must exceed max_num_seqs \(32\)"):
        limits(max_batched_tokens=tokens, max_num_seqs=sequences)
    assert limits(max_batched_tokens=33, max_num_seqs=32).max_batched_tokens == 33


@pytest.mark.parametrize("depth", [0, 3])
def test_one_or_two_steps_are_in_flight(depth: int) -> None:
    with pytest.raises(InvalidConfiguration, match=f"must be 1 or 2, not {depth}"):
        limits(max_steps_in_flight=depth)
    assert [limits(max_steps_in_flight=depth).max_steps_in_flight for depth in (1, 2)] == [1, 2]

"""Vectors of prompts as the planner makes them: of every position once, whatever is chunked, cached or preempted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import ForwardFailed, InvalidRequest
from planner.planner import Planner
from planner.request import FinishReason, Pooling, Request, Update
from tests.fakes import FakeExecutor, fake_info, fake_limits, fake_request
from tests.turns import Turns


class Life(Turns[FakeExecutor]):
    """A planner and a fake executor whose hidden states are (token, position, 1)."""

    def __init__(self, capacity: int = 256, swap_blocks: int = 0, **limits: int) -> None:
        info = fake_info(num_cells=capacity, swap_blocks=swap_blocks, swap_block_cells=4)
        fields = {"min_swapped_cells": 4, "prefill_chunk_tokens": 8}
        super().__init__(fake_limits(info, **(fields | limits)), FakeExecutor(info))
        self.ended: dict[int, Update] = {}

    def turn(self) -> list[Update]:
        updates = super().turn()
        for update in updates:
            assert (not update.vector) or update.finish_reason is not None
            if update.finish_reason is not None:
                self.ended[update.request_id] = update
        return updates


def pooled(prompt: Sequence[int], pooling: Pooling) -> Request:
    return fake_request(prompt, 0, pooling=pooling)


def expected(prompt: Sequence[int], pooling: Pooling) -> tuple[float, ...]:
    if pooling is Pooling.LAST:
        return (prompt[-1], len(prompt) - 1, 1)
    return (sum(prompt) / len(prompt), (len(prompt) - 1) / 2, 1)


@given(
    prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=6),
    pooling=st.sampled_from(Pooling),
    chunk=st.integers(1, 16),
)
def test_a_vector_is_of_every_position_once_however_prompts_are_cut(
    prompts: list[list[int]], pooling: Pooling, chunk: int
) -> None:
    life = Life(prefill_chunk_tokens=chunk)
    for _ in range(2):  # the second time everything is resident
        ids = [life.planner.submit(pooled(prompt, pooling)) for prompt in prompts]
        life.run()
        for request_id, prompt in zip(ids, prompts, strict=True):
            assert life.ended[request_id].vector == pytest.approx(expected(prompt, pooling))
            assert life.ended[request_id].finish_reason is FinishReason.LENGTH


def test_the_last_position_is_found_behind_a_resident_prefix_and_a_mean_computes_all() -> None:
    for pooling, num_cached in ((Pooling.LAST, 19), (Pooling.MEAN, 0)):
        life = Life()
        prompt = list(range(20))
        for _ in range(2):
            request_id = life.planner.submit(pooled(prompt, pooling))
            life.run()
        assert life.ended[request_id].num_cached_tokens == num_cached


@pytest.mark.parametrize("swap_blocks", [0, 16])
def test_a_preempted_mean_counts_no_position_twice(swap_blocks: int) -> None:
    life = Life(capacity=40, swap_blocks=swap_blocks, max_num_seqs=4, max_batched_tokens=5, prefill_chunk_tokens=2)
    prompt = [7] * 5 + list(range(23))
    life.planner.submit(fake_request(range(100, 110), 25))
    while not life.planner.snapshot().num_running or life.planner.num_queued_tokens:
        life.turn()
    request_id = life.planner.submit(pooled(prompt, Pooling.MEAN))
    life.run()
    assert life.ended[request_id].vector == pytest.approx(expected(prompt, Pooling.MEAN))
    assert life.planner.metrics.num_preemptions > 0
    assert life.planner.metrics.num_swapped_in == (1 if swap_blocks else 0)


def test_a_failed_forward_brings_no_vector() -> None:
    life = Life(max_batched_tokens=17)
    life.executor.fail_forward(1)
    request_id = life.planner.submit(pooled(range(30), Pooling.MEAN))
    life.run()
    assert life.ended[request_id].vector == ()
    assert isinstance(life.ended[request_id].error, ForwardFailed)


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"n": 2}, {"prompt_logprobs": True}])
def test_a_vector_comes_with_nothing_else(changes: dict[str, int]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Request(**{"prompt": fake_request().prompt, "max_tokens": 0, "pooling": Pooling.LAST} | changes)
    assert caught.value.param == "pooling"


def test_a_program_without_vectors_refuses_and_changes_nothing() -> None:
    planner = Planner(fake_limits(fake_info(vector_size=None)))
    with pytest.raises(InvalidRequest, match="no vectors"):
        planner.submit(pooled([1, 2], Pooling.LAST))
    assert not planner.has_work

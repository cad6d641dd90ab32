"""Requests of several sequences, and log probabilities of prompts."""

from __future__ import annotations

import pytest

from planner.request import FinishReason, SamplingParams, sequence_seed
from planner.step import Step
from tests.fakes import expected_tokens, fake_request
from tests.planner_life import PlannerLife, new_life


def told(life: PlannerLife, request_id: int = 1) -> list[int]:
    return life.prompt_logprobs[request_id, 0]


def test_the_others_fork_from_the_prompt_and_compute_its_last_token_themselves() -> None:
    life = new_life(widths=(1, 2, 4), prefix_caching=False)
    life.submit(fake_request([1, 2, 3, 4], 3, n=3, sampling=SamplingParams(seed=5)))
    step, updates = life.step()
    assert [(chunk.start, chunk.length) for chunk in step.chunks] == [(0, 4)]
    assert [(update.index, len(update.tokens)) for update in updates] == [(0, 1)]
    assert life.planner.snapshot().owned_cells == 4
    step, updates = life.step()
    assert [(chunk.start, chunk.length) for chunk in step.chunks] == [(4, 1), (3, 1), (3, 1)]
    assert [chunk.cells.tolist() for chunk in step.chunks] == [[0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 6]]
    assert [chunk.sampling.seed for chunk in step.chunks] == [sequence_seed(5, index) for index in range(3)]
    assert [update.index for update in updates] == [0, 1, 2]
    life.finish()
    assert len({life.tokens[1, index] for index in range(3)}) == 3


def test_index_zero_draws_what_a_single_sequence_would() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3, 4], 6, n=3, sampling=SamplingParams(seed=5)))
    life.submit(fake_request([1, 2, 3, 4], 6, sampling=SamplingParams(seed=5)))
    life.finish()
    assert life.tokens[1, 0] == life.tokens[2, 0] != life.tokens[1, 1]


def test_a_one_token_prompt_can_be_forked() -> None:
    life = new_life()
    life.submit(fake_request([7], 3, n=4))
    life.finish()
    assert len(life.ended) == 4


def test_sequences_that_wait_to_fork_count_as_running() -> None:
    life = new_life(max_num_seqs=4, max_batched_tokens=8)
    life.submit(fake_request(range(12), 2, n=3))
    life.submit(fake_request([50], 2, n=2))
    life.submit(fake_request([51], 2))
    step, _ = life.step()
    assert len(step.chunks) == 1
    state = life.planner.snapshot()
    assert (state.num_running, state.num_waiting) == (3, 2)
    life.finish()


def test_the_others_still_get_their_answer_when_index_zero_is_cancelled_in_its_prompt() -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(20), 3, n=3))
    life.step()
    life.cancel(1, {0})
    assert life.planner.cancel(1, [0]) == []
    leading = [life.step()[0].chunks[0] for _ in range(2)]
    assert [(chunk.start, chunk.samples) for chunk in leading] == [(8, False), (16, False)]
    assert life.planner.snapshot().owned_cells == 19, "the leader left when the others had forked"
    life.finish()
    assert life.ended == {
        (1, 0): FinishReason.CANCELLED,
        (1, 1): FinishReason.LENGTH,
        (1, 2): FinishReason.LENGTH,
    }
    assert life.tokens[1, 2] == expected_tokens(life.requests[1], 2, vocab_size=100)


def test_a_prompt_that_nobody_waits_for_any_more_is_given_up() -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(20), 3, n=3))
    life.step()
    life.cancel(1, {0, 2})
    assert life.planner.snapshot().owned_cells == 8
    life.cancel(1, {1})
    assert life.planner.snapshot().owned_cells == 0
    assert not life.planner.has_work


def test_a_waiting_request_can_lose_any_of_its_sequences() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3], 2, n=4))
    life.cancel(1, {0, 2})
    life.finish()
    assert [life.ended[1, index] is FinishReason.CANCELLED for index in range(4)] == [True, False, True, False]


@pytest.mark.parametrize("cancel_first", [False, True])
def test_a_failed_prompt_fails_all_that_waited_for_it(cancel_first: bool) -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(12), 3, n=3))
    life.step()
    assert life.planner.snapshot().owned_cells == 8
    if cancel_first:
        life.cancel(1, {0})
    _, updates = life.step(failing_slice=0)
    assert [update.index for update in updates] == ([1, 2] if cancel_first else [0, 1, 2])
    assert all(update.finish_reason is FinishReason.FAILED and update.error for update in updates)
    assert life.planner.snapshot().free_cells == 256, "what a failed sequence computed is not reused"
    life.finish()


def test_after_the_fork_each_fails_alone() -> None:
    life = new_life()
    life.submit(fake_request(range(4), 3, n=3))
    life.step()
    _, updates = life.step(failing_slice=2)
    assert [update.finish_reason for update in updates] == [FinishReason.FAILED] * 3  # one prefill held all three
    life.submit(fake_request(range(4), 3, n=3))
    life.cancel(2, {1})
    life.finish()
    assert life.ended[2, 0] is life.ended[2, 2] is FinishReason.LENGTH


def test_a_preempted_prompt_takes_its_waiting_forks_with_it() -> None:
    life = new_life(capacity=22, max_batched_tokens=6, max_num_seqs=4, prefix_caching=False)
    life.submit(fake_request([1, 2, 3, 4], 12))
    life.step()
    life.submit(fake_request(range(20, 33), 2, n=3))
    while not life.planner.metrics.num_preemptions:
        life.step()
    life.finish()
    assert life.tokens[2, 2] == expected_tokens(life.requests[2], 2, vocab_size=100)


def test_prompt_logprobs_come_once_a_position_and_the_first_has_none() -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(10, 20), 2, prompt_logprobs=True))
    step, (update,) = life.step()
    targets = step.chunks[0].prompt_targets
    assert targets is not None
    assert targets.tolist() == list(range(11, 19))
    assert [logprobs.token for logprobs in update.prompt_logprobs] == list(range(10, 19))
    assert update.prompt_logprobs[0].logprob is None
    assert all(logprobs.logprob is not None for logprobs in update.prompt_logprobs[1:])
    step, (update,) = life.step()
    targets = step.chunks[0].prompt_targets
    assert targets is not None
    assert targets.tolist() == [19]
    assert [logprobs.token for logprobs in update.prompt_logprobs] == [19]
    assert len(update.tokens) == 1
    step, (update,) = life.step()
    assert step.chunks[0].prompt_targets is None
    assert update.prompt_logprobs == ()


def test_a_prompt_of_one_token_has_one_empty_log_probability() -> None:
    life = new_life()
    life.submit(fake_request([7], 0, prompt_logprobs=True))
    step, (update,) = life.step()
    assert step.chunks[0].prompt_targets is None
    assert [(entry.token, entry.logprob) for entry in update.prompt_logprobs] == [(7, None)]
    assert update.finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_need_every_row_so_nothing_is_matched() -> None:
    life = new_life()
    life.submit(fake_request(range(10), 1))
    life.finish()
    life.submit(fake_request(range(10), 1, prompt_logprobs=True))
    step, (update,) = life.step()
    assert (step.chunks[0].start, step.chunks[0].length) == (0, 10)
    assert update.num_cached_tokens == 0
    assert life.planner.metrics.num_prefix_queries == 10


def test_a_preempted_prompt_does_not_tell_a_log_probability_twice() -> None:
    life = new_life(capacity=22, max_batched_tokens=6, max_num_seqs=2, prefix_caching=False)
    life.submit(fake_request([1, 2, 3, 4], 12))
    life.step()
    life.submit(fake_request(range(20, 35), 4, prompt_logprobs=True))
    life.finish()
    assert life.planner.metrics.num_preemptions > 0
    assert told(life, 2) == list(range(20, 35))


def test_a_prompt_preempted_half_way_goes_on_telling_where_it_stopped() -> None:
    life = new_life(capacity=20, max_batched_tokens=4, max_num_seqs=3, prefix_caching=False)
    life.submit(fake_request([1], 15))
    for _ in range(6):
        life.step()
    life.submit(fake_request(range(20, 32), 2, prompt_logprobs=True))
    while not life.planner.metrics.num_preemptions:
        life.step()
    assert 1 < len(told(life, 2)) < 12
    life.finish()
    assert told(life, 2) == list(range(20, 32))


def test_once_all_is_told_a_preempted_sequence_may_use_the_index_again() -> None:
    life = new_life(capacity=20, max_num_seqs=2)
    life.submit(fake_request([1, 2, 3, 4, 5], 12))
    life.submit(fake_request([6, 7, 8, 9, 10], 8, prompt_logprobs=True))
    life.finish()
    assert life.planner.metrics.num_preemptions > 0
    assert life.planner.metrics.num_prefix_hits > 0
    assert told(life, 2) == [6, 7, 8, 9, 10]


@pytest.mark.parametrize("cancelled", [set(), {0}])
def test_a_request_for_no_token_ends_with_its_prompt(cancelled: set[int]) -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(12), 0, n=2, prompt_logprobs=True))
    steps: list[Step] = [life.step()[0]]
    life.cancel(1, cancelled)
    steps.append(life.step()[0])
    assert not any(chunk.samples for step in steps for chunk in step.chunks)
    assert not life.planner.has_work
    assert life.ended[1, 1] is FinishReason.LENGTH
    assert life.ended[1, 0] is (FinishReason.CANCELLED if cancelled else FinishReason.LENGTH)
    assert told(life) == list(range(9 if cancelled else 12))
    life.finish()


def test_only_index_zero_tells_of_the_prompt() -> None:
    life = new_life()
    life.submit(fake_request(range(5), 3, n=2, prompt_logprobs=True))
    life.finish()
    assert told(life) == list(range(5))
    assert life.prompt_logprobs[1, 1] == []

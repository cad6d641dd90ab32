"""What a step is told of its chunks, how sequences end, and what a planner refuses (statements 54-66 and 74-75)."""

from __future__ import annotations

import pytest

from planner.errors import InvalidRequest
from planner.request import FinishReason, SamplingParams, TokenLogprobs, Update
from planner.step import ChunkOutput, Step, StepResult
from tests.fakes import fake_request
from tests.planner_life import new_life


def test_a_prompt_is_fed_in_chunks_and_only_the_last_one_samples() -> None:
    life = new_life(max_batched_tokens=5, prefill_chunk_tokens=4, max_prefill_tokens=4)
    life.submit(fake_request(range(10), 1))
    chunks = [life.step()[0].chunks[0] for _ in range(2)]
    assert [(chunk.start, chunk.length, chunk.samples) for chunk in chunks] == [(0, 5, False), (5, 5, True)]
    assert [chunk.cells.tolist() for chunk in chunks] == [list(range(5)), list(range(10))]
    assert [chunk.tokens.tolist() for chunk in chunks if chunk.tokens is not None] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert all(chunk.num_prompt == 10 for chunk in chunks)


def test_three_tokens_of_a_long_prompt_take_three_steps() -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(10), 3))
    life.finish()
    metrics = life.planner.metrics
    assert metrics.num_steps == 4
    assert metrics.num_prompt_tokens_computed == 10
    assert metrics.num_tokens.total() == 12
    assert metrics.num_tokens_generated == 3


def test_the_last_sampled_token_is_pending_until_it_is_fed() -> None:
    life = new_life(prefix_caching=False)
    life.submit(fake_request([1, 2, 3], 2))
    _, (first,) = life.step()
    assert life.planner.snapshot().owned_cells == 3
    step, (last,) = life.step()
    (chunk,) = step.chunks
    assert chunk.tokens is not None
    assert (chunk.start, chunk.tokens.tolist()) == (3, list(first.tokens))
    assert last.finish_reason is FinishReason.LENGTH
    assert life.planner.snapshot().free_cells == 256


def test_a_stop_token_is_delivered_and_wins_over_the_budget() -> None:
    life = new_life(script={3: 9})
    life.submit(fake_request([1, 2, 3], 1, stop_token_ids=frozenset({9})))
    _, (update,) = life.step()
    assert (update.tokens, update.finish_reason) == ((9,), FinishReason.STOP)
    assert not life.planner.has_work
    assert life.planner.plan() is None


def test_stop_tokens_are_masked_until_the_minimum_is_generated() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3], 4, min_tokens=2, stop_token_ids=frozenset({9})))
    masks = [life.step()[0].chunks[0].masked for _ in range(4)]
    assert masks == [frozenset({9}), frozenset({9}), frozenset(), frozenset()]


def test_a_stop_token_that_comes_in_spite_of_its_mask_does_not_end_the_sequence() -> None:
    life = new_life(script={3: 9, 4: 9, 5: 9})
    life.submit(fake_request([1, 2, 3], 9, min_tokens=2, stop_token_ids=frozenset({9})))
    updates = [life.step()[1][0] for _ in range(3)]
    assert [update.finish_reason for update in updates] == [None, None, FinishReason.STOP]


def test_a_budget_ends_with_length() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3], 3))
    updates = [life.step()[1][0] for _ in range(3)]
    assert [len(update.tokens) for update in updates] == [1, 1, 1]
    assert [update.finish_reason for update in updates] == [None, None, FinishReason.LENGTH]


def test_a_draw_with_penalties_is_told_the_history_and_others_are_not() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3], 2, sampling=SamplingParams(presence_penalty=1.0)))
    life.submit(fake_request([4, 5], 2))
    step, (update, _) = life.step()
    first, other = step.chunks
    assert first.history is not None
    assert first.history.tolist() == [1, 2, 3]
    assert other.history is None
    first = life.step()[0].chunks[0]
    assert first.history is not None
    assert first.history.tolist() == [1, 2, 3, *update.tokens]


def test_a_continuation_counts_its_earlier_tokens_as_its_own_and_not_as_prompt() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3, 8, 9], 2, sampling=SamplingParams(presence_penalty=1.0), num_generated=2))
    chunk = life.step()[0].chunks[0]
    assert chunk.history is not None
    assert chunk.history[chunk.num_prompt :].tolist() == [8, 9]
    life.finish()


def test_a_continuation_runs_before_new_requests_of_its_class_and_after_those_of_a_better_one() -> None:
    life = new_life(max_num_seqs=1)
    life.submit(fake_request([1, 2], 1))
    life.submit(fake_request([3, 4], 1, num_generated=1))
    life.submit(fake_request([5, 6], 1, priority=-1))
    assert [update.request_id for _ in range(3) for update in life.step()[1]] == [3, 2, 1]


@pytest.mark.parametrize("num_generated", [-1, 3])
def test_at_least_one_token_of_a_continuation_is_its_prompt(num_generated: int) -> None:
    with pytest.raises(InvalidRequest, match="num_generated"):
        fake_request([1, 2, 3], num_generated=num_generated)


def test_log_probabilities_travel_with_their_token() -> None:
    life = new_life()
    life.submit(fake_request([1, 2], 2, sampling=SamplingParams(logprobs=2)))
    _, (update,) = life.step()
    assert [logprobs.token for logprobs in update.logprobs] == list(update.tokens)
    assert len(update.logprobs[0].top) == 2


def test_cancelling_answers_at_once_and_frees_the_cells() -> None:
    life = new_life(max_batched_tokens=8, prefix_caching=False)
    life.submit_prompts(16, 4)
    life.step()
    assert life.planner.cancel(1) == [Update(1, 0, finish_reason=FinishReason.CANCELLED)]
    assert life.planner.snapshot().owned_cells == 0
    assert life.planner.cancel(1) == life.planner.cancel(99) == []
    assert life.planner.cancel(2, [1]) == []
    assert [update.request_id for update in life.planner.cancel(2, [0])] == [2]
    assert not life.planner.has_work


def test_a_failed_forward_ends_only_the_sequences_it_held() -> None:
    life = new_life(max_prefill_tokens=4, prefix_caching=False)
    life.submit_prompts(4, 3, 3)
    _, updates = life.step(failing_slice=1)
    assert [(update.request_id, update.finish_reason) for update in updates] == [
        (1, None),
        (2, FinishReason.FAILED),
        (3, FinishReason.FAILED),
    ]
    assert updates[1].error is not None
    assert life.planner.snapshot().owned_cells == 4
    life.finish()


def test_a_commit_takes_only_the_oldest_step_and_a_result_that_fits_it() -> None:
    life = new_life()
    life.submit_prompts(4)
    life.submit(fake_request([1, 2], 2, prompt_logprobs=True))
    step = life.planner.plan()
    assert step is not None
    assert life.planner.plan() is None
    first, told = ChunkOutput(5), (TokenLogprobs(2, -1.0),)
    good = StepResult([first, ChunkOutput(6, None, told)])
    before = life.planner.snapshot()
    for wrong, message in (
        ([], "step 1 has 2 chunks and 0 outcomes"),
        ([first], "step 1 has 2 chunks and 1 outcomes"),
        ([first, ChunkOutput(None, None, told)], "sequence 2 of step 1 samples, and has None"),
        ([first, ChunkOutput(100, None, told)], "sequence 2 of step 1 has token id 100, and the vocabulary is"),
        ([first, ChunkOutput(6)], "sequence 2 of step 1 has 0 of 1 prompt log probabilities"),
    ):
        with pytest.raises(ValueError, match=message):
            life.planner.commit(step, StepResult(wrong))
    with pytest.raises(ValueError, match="step 7 is not the oldest"):
        life.planner.commit(Step(7, step.chunks, step.slices), good)
    assert life.planner.snapshot() == before
    assert len(life.planner.commit(step, good)) == 2
    with pytest.raises(ValueError, match="step 1 is not the oldest"):
        life.planner.commit(step, good)


def test_a_dead_executor_fails_everything_and_leaves_an_empty_pool() -> None:
    life = new_life(max_num_seqs=2, max_batched_tokens=8)
    life.submit_prompts(3, 12, 5)
    life.submit(fake_request([1, 2], 2, n=2))
    life.step()
    life.launch(None)
    life.lose_the_executor()
    assert sorted(life.ended) == [(1, 0), (2, 0), (3, 0), (4, 0), (4, 1)]
    life.submit_prompts(3)
    assert life.step()[0].number == 3
    life.finish()


def test_the_snapshot_says_what_runs_waits_and_is_to_be_prefilled() -> None:
    life = new_life(max_num_seqs=3, max_batched_tokens=8)
    life.submit_prompts(6, 10)
    life.submit(fake_request([1, 2, 3], 2, n=2))
    life.step()
    state = life.planner.snapshot()
    assert (state.num_running, state.num_waiting, state.step) == (2, 1, 1)
    assert state.owned_cells == 8
    assert state.queued_prefill_tokens == 16 - 8 + 3
    life.finish()
    state = life.planner.snapshot()
    assert state.free_cells + state.cached_cells == 256
    assert state.queued_prefill_tokens == state.num_running == state.num_waiting == 0


def test_an_executor_cannot_change_what_it_is_given() -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3], 2, sampling=SamplingParams(presence_penalty=1.0)))
    (chunk,) = life.step()[0].chunks
    for array in (chunk.cells, chunk.tokens, chunk.history):
        assert array is not None
        assert not array.flags.writeable

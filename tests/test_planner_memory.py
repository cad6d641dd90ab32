"""Cells under pressure: admission, prefix hits, eviction, preemption."""

from __future__ import annotations

import pytest

from planner.request import FinishReason, SamplingParams
from planner.step import Chunk
from tests.fakes import expected_tokens, fake_request
from tests.planner_life import PlannerLife, new_life


def started_at(life: PlannerLife) -> list[tuple[int, int]]:
    """(start, length) of each chunk of the next step."""
    return [(chunk.start, chunk.length) for chunk in life.step()[0].chunks]


def counts(life: PlannerLife) -> tuple[int, int, int]:
    life.check()
    state = life.planner.snapshot()
    return state.free_cells, state.owned_cells, state.cached_cells


def test_a_prompt_is_admitted_only_when_all_of_it_and_one_more_fit() -> None:
    life = new_life(capacity=16, prefix_caching=False)
    life.submit(fake_request(range(8), 2))
    life.submit(fake_request(range(20, 28), 2))
    assert started_at(life) == [(0, 8)]
    assert life.planner.snapshot().num_waiting == 1
    assert started_at(life) == [(8, 1)]
    assert started_at(life) == [(0, 8)]
    life.finish()


def test_admission_counts_what_running_prompts_still_need() -> None:
    life = new_life(capacity=24, max_batched_tokens=8, max_num_seqs=2, prefix_caching=False)
    life.submit(fake_request(range(16), 1))
    life.submit(fake_request(range(20, 30), 1))
    assert started_at(life) == [(0, 8)]
    assert started_at(life) == [(8, 8)]
    assert life.planner.snapshot().num_waiting == 1


def test_nobody_overtakes_a_request_that_waits_for_cells() -> None:
    life = new_life(capacity=16, prefix_caching=False)
    life.submit(fake_request(range(8), 3))
    life.submit(fake_request(range(20, 28), 1))
    life.submit(fake_request([40], 1))
    assert started_at(life) == [(0, 8)]
    assert started_at(life) == [(8, 1)]
    assert life.planner.snapshot().num_waiting == 2
    life.finish()


def test_a_request_that_fills_the_whole_pool_runs_alone() -> None:
    life = new_life(capacity=16, prefix_caching=False)
    life.submit(fake_request(range(12), 5))
    life.submit(fake_request(range(16), 1))
    life.finish()
    assert set(life.ended.values()) == {FinishReason.LENGTH}
    assert life.planner.metrics.num_preemptions == 0


def test_a_known_prefix_is_not_computed_again() -> None:
    life = new_life()
    life.submit(fake_request(range(10), 1))
    life.finish()
    life.submit(fake_request([*range(8), 50, 51], 2))
    step, (update,) = life.step()
    assert [(chunk.start, chunk.length) for chunk in step.chunks] == [(8, 2)]
    assert update.num_cached_tokens == 8
    metrics = life.planner.metrics
    assert (metrics.num_prefix_queries, metrics.num_prefix_hits) == (20, 8)
    life.finish()


def test_the_next_turn_of_a_chat_finds_the_answer_of_the_last_one() -> None:
    life = new_life()
    life.submit(fake_request(range(6), 5))
    life.finish()
    answer = life.tokens[1, 0]
    life.submit(fake_request([*range(6), *answer, 70], 1))
    # The last token of the answer was never fed, so its cell is missing.
    assert started_at(life) == [(10, 2)]


def test_a_whole_known_prompt_still_computes_its_last_token() -> None:
    life = new_life()
    life.submit(fake_request(range(6), 1))
    life.finish()
    life.submit(fake_request(range(6), 1))
    assert started_at(life) == [(5, 1)]


def test_a_prefix_is_not_known_before_its_forward_is_committed() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request(range(6), 2))
    life.submit(fake_request(range(6), 2))
    step = life.launch(None)
    assert step is not None
    assert [(chunk.start, chunk.length) for chunk in step.chunks] == [(0, 6), (0, 6)]
    life.submit(fake_request(range(6), 2))
    step = life.launch(None)
    assert step is not None
    assert (step.chunks[-1].start, step.chunks[-1].length) == (0, 6)
    life.settle()
    life.submit(fake_request(range(6), 2))
    step = life.launch(None)
    assert step is not None
    assert (step.chunks[-1].start, step.chunks[-1].length) == (5, 1)
    life.finish()


def test_a_failed_forward_leaves_nothing_in_the_prefix_index() -> None:
    life = new_life()
    life.submit(fake_request(range(6), 2))
    life.step(failing_slice=0)
    assert counts(life) == (256, 0, 0)
    life.submit(fake_request(range(6), 3))
    life.step()
    life.step(failing_slice=0)
    assert counts(life) == (250, 0, 6)
    life.submit(fake_request(range(6), 3))
    life.finish()


def test_what_a_cancelled_sequence_committed_stays_known() -> None:
    life = new_life(max_batched_tokens=8)
    life.submit(fake_request(range(20), 2))
    life.step()
    life.cancel(1, None)
    assert counts(life) == (248, 0, 8)
    life.submit(fake_request(range(20), 2))
    assert started_at(life) == [(8, 8)]


def test_cached_prefixes_give_way_before_anybody_is_preempted() -> None:
    life = new_life(capacity=16)
    life.submit(fake_request(range(10), 1))
    life.finish()
    assert counts(life) == (6, 0, 10)
    life.submit(fake_request(range(20, 32), 2))
    assert started_at(life) == [(0, 12)]
    assert counts(life) == (0, 12, 4)
    assert life.planner.metrics.num_preemptions == 0
    life.finish()


def test_the_newest_of_the_lowest_class_is_preempted_and_loses_no_token() -> None:
    life = new_life(capacity=20, widths=(1, 2, 4))
    prompts = ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    for prompt, priority in zip(prompts, (0, 1, 0), strict=True):
        life.submit(fake_request(prompt, 12, priority=priority))
    while not life.planner.metrics.num_preemptions:
        life.step()
    assert life.planner.snapshot().num_waiting == 1
    life.cancel(1, None)
    life.cancel(3, None)
    assert life.planner.snapshot().num_waiting == 1, "it was request 2, though request 3 is newer"
    before = life.tokens[2, 0]
    life.finish()
    assert life.tokens[2, 0][: len(before)] == before
    assert life.ended[2, 0] is FinishReason.LENGTH


@pytest.mark.parametrize("caching", [True, False])
def test_preemption_recomputes_and_draws_the_same(caching: bool) -> None:
    life = new_life(capacity=24, prefix_caching=caching)
    for seed in range(4):
        life.submit(fake_request([1, 2, seed], 20, sampling=SamplingParams(seed=seed)))
    life.finish()
    assert life.planner.metrics.num_preemptions > 3
    for request_id, request in life.requests.items():
        assert life.tokens[request_id, 0] == expected_tokens(request, vocab_size=100)


def test_the_oldest_is_never_preempted() -> None:
    life = new_life(capacity=24)
    for first in range(4):
        life.submit(fake_request([first, 1, 2], 20))
    ids = set()
    while (1, 0) not in life.ended:
        step, _ = life.step()
        ids.add(step.chunks[0].sequence_id)
    assert ids == {1}
    assert life.planner.metrics.num_preemptions > 0


def test_a_preempted_sequence_goes_back_to_its_place_in_the_queue() -> None:
    life = new_life(capacity=16, max_num_seqs=2, prefix_caching=False)
    life.submit(fake_request([1, 2, 3, 4, 5], 12))
    life.submit(fake_request([6, 7, 8, 9, 10], 8))
    life.submit(fake_request([11], 1))
    while not life.planner.metrics.num_preemptions:
        life.step()
    while (1, 0) not in life.ended:
        life.step()
    step, _ = life.step()
    assert (step.chunks[0].start, step.chunks[0].length) == (0, 9)  # five of the prompt, four generated
    life.finish()


def test_the_newest_waits_in_place_rather_than_preempting_itself() -> None:
    """A prompt that finds no cell holds what it has; the older sequences take it only when they need it."""
    life = new_life(capacity=17, max_batched_tokens=12, prefill_chunk_tokens=12, prefix_caching=False)
    life.submit(fake_request([1, 2], 6))
    life.step()
    life.submit(fake_request(range(20, 32), 1))
    assert started_at(life) == [(2, 1), (0, 11)]
    assert started_at(life) == [(3, 1), (11, 1)]
    assert life.planner.metrics.num_preemptions == 0
    life.finish()


def test_an_older_prompt_takes_cells_from_newer_decodes() -> None:
    life = new_life(capacity=16, max_batched_tokens=4, max_num_seqs=3, prefix_caching=False)
    life.submit(fake_request([1], 14, priority=1))
    life.submit(fake_request([2], 14, priority=1))
    life.step()
    life.submit(fake_request(range(20, 30), 1, priority=-1))
    while (3, 0) not in life.ended:
        life.step()
    assert life.planner.metrics.num_preemptions == 1
    life.finish()


def test_a_prompt_preempted_in_this_very_step_gets_no_turn_in_it() -> None:
    """An old decode grows beside two prompts until the older one takes the cells of the newer one."""
    life = new_life(capacity=19, max_batched_tokens=4, max_num_seqs=3, prefill_chunk_tokens=4, prefix_caching=False)
    life.submit(fake_request([1], 17))
    life.step()
    life.submit(fake_request(range(20, 28), 2))
    life.submit(fake_request(range(40, 48), 2))
    while not life.planner.metrics.num_preemptions:
        step, _ = life.step()
    assert [chunk.sequence_id for chunk in step.chunks] == [1, 2]
    life.finish()


def test_executors_are_told_which_cell_lists_are_gone() -> None:
    life = new_life(capacity=20, prefix_caching=False)
    life.submit(fake_request([1, 2], 1))
    life.submit(fake_request([3, 4], 5))
    assert life.step()[0].dropped == ()
    assert life.step()[0].dropped == (1,)
    assert life.step()[0].dropped == ()
    life.cancel(2, None)
    life.submit(fake_request([5, 6], 1))
    assert life.step()[0].dropped == (2,)


def test_a_new_cell_list_has_a_new_id_after_preemption() -> None:
    life = new_life(capacity=12, max_num_seqs=2)
    chunks: dict[int, list[Chunk]] = {}
    life.submit(fake_request([1, 2, 3], 8))
    life.submit(fake_request([4, 5, 6], 8))
    while life.planner.has_work:
        for chunk in life.step()[0].chunks:
            chunks.setdefault(chunk.sequence_id, []).append(chunk)
    assert sorted(chunks) == list(range(1, 3 + life.planner.metrics.num_preemptions))
    for own in chunks.values():
        starts = [chunk.start for chunk in own]
        assert starts == sorted(set(starts))

"""Two steps in flight: what may run ahead of the host, and what it costs when it should not have."""

from __future__ import annotations

import pytest

from planner.request import FinishReason, SamplingParams
from planner.step import ChunkOutput, Step, StepResult
from tests.fakes import expected_tokens, fake_request
from tests.planner_life import PlannerLife, new_life


def launched(life: PlannerLife) -> Step:
    step = life.launch(None)
    assert step is not None
    return step


def owned(life: PlannerLife) -> int:
    life.check()
    return life.planner.snapshot().owned_cells


def test_a_decode_runs_ahead_on_a_token_that_the_host_has_not_seen() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request([1, 2, 3], 4))
    launched(life)
    (chunk,) = launched(life).chunks
    assert chunk.tokens is None
    assert (chunk.start, chunk.length, chunk.cells.tolist(), chunk.samples) == (3, 1, [0, 1, 2, 3], True)
    assert life.planner.plan() is None
    life.finish()


def test_chunks_of_one_prompt_run_ahead_with_their_tokens() -> None:
    life = new_life(max_steps_in_flight=2, max_batched_tokens=8)
    life.submit(fake_request(range(12), 2))
    chunks = [launched(life).chunks[0] for _ in range(2)]
    assert [(chunk.start, chunk.length, chunk.samples) for chunk in chunks] == [(0, 8, False), (8, 4, True)]
    assert all(chunk.tokens is not None for chunk in chunks)
    life.finish()


def test_a_draw_that_reads_the_tokens_before_it_does_not_run_ahead() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request([1, 2, 3], 4, sampling=SamplingParams(frequency_penalty=1.0)))
    life.submit(fake_request([4, 5, 6], 4))
    launched(life)
    assert [chunk.sequence_id for chunk in launched(life).chunks] == [2]
    life.settle()
    assert [chunk.sequence_id for chunk in launched(life).chunks] == [1, 2]
    life.finish()


def test_a_budget_that_the_step_in_flight_will_use_up_is_not_planned_beyond() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request([1, 2, 3], 1))
    launched(life)
    assert life.planner.plan() is None
    (update,) = life.settle()
    assert update.finish_reason is FinishReason.LENGTH
    assert life.planner.metrics.num_steps == 1


def test_a_stop_found_late_costs_one_discarded_token() -> None:
    life = new_life(max_steps_in_flight=2, script={4: 9}, prefix_caching=False)
    life.submit(fake_request([1, 2, 3], 8, stop_token_ids=frozenset({9})))
    launched(life)
    launched(life)
    life.settle()
    launched(life)
    assert owned(life) == 5
    (update,) = life.settle()
    assert (update.tokens, update.finish_reason) == ((9,), FinishReason.STOP)
    assert owned(life) == 5, "a step in flight still writes to the last cell"
    assert life.planner.plan() is None
    assert life.settle() == []
    assert owned(life) == 0
    assert not life.planner.has_work
    life.finish()


def test_a_discarded_row_is_not_remembered_as_a_prefix() -> None:
    life = new_life(max_steps_in_flight=2, script={4: 9})
    life.submit(fake_request([1, 2, 3], 8, stop_token_ids=frozenset({9})))
    life.finish()
    assert life.planner.snapshot().cached_cells == 4
    assert life.planner.snapshot().free_cells == 252


def test_a_cancelled_sequence_keeps_its_cells_while_a_step_in_flight_writes_to_them() -> None:
    life = new_life(max_steps_in_flight=2, prefix_caching=False)
    life.submit(fake_request([1, 2, 3], 8))
    launched(life)
    launched(life)
    life.cancel(1, None)
    assert life.planner.snapshot().num_running == 0
    assert owned(life) == 4
    assert life.settle() == []
    assert owned(life) == 4
    assert life.settle() == []
    assert owned(life) == 0


def test_everything_cancelled_is_still_committed() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request([1, 2, 3], 8, n=2))
    launched(life)
    life.cancel_all()
    assert life.planner.has_work
    assert life.settle() == []
    assert not life.planner.has_work


def test_what_follows_a_failed_chunk_is_discarded_whatever_came_of_it() -> None:
    life = new_life(max_steps_in_flight=2, max_batched_tokens=8, prefix_caching=False)
    life.submit(fake_request(range(12), 2, n=2))
    life.launch(0)
    second = launched(life)
    updates = life.settle()
    assert [(update.index, update.finish_reason) for update in updates] == [
        (0, FinishReason.FAILED),
        (1, FinishReason.FAILED),
    ]
    assert owned(life) == 12
    assert life.planner.commit(second, StepResult([ChunkOutput(5)])) == []
    assert owned(life) == 0


def asked_for_a_commit_before_preempting(life: PlannerLife) -> bool:
    """Run until somebody is preempted; whether the plan before that one was none, with a step in flight."""
    plans: list[Step | None] = []
    while not life.planner.metrics.num_preemptions:
        plans.append(life.launch(None))
        if plans[-1] is None or len(life.in_flight) == 2:
            before = life.planner.snapshot()
            assert life.planner.plan() is None
            assert life.planner.snapshot() == before, "a plan that says none changed something"
            life.settle()
    return plans[-2] is None


def test_a_planner_short_of_cells_asks_for_the_commit_before_it_preempts() -> None:
    life = new_life(capacity=10, max_steps_in_flight=2, prefix_caching=False)
    life.submit(fake_request([1, 2, 3], 6))
    life.submit(fake_request([4, 5, 6], 6))
    assert asked_for_a_commit_before_preempting(life)
    life.finish()


def test_a_prompt_short_of_cells_asks_for_the_commit_as_well() -> None:
    life = new_life(capacity=16, max_steps_in_flight=2, max_batched_tokens=4, max_num_seqs=3, prefix_caching=False)
    life.submit(fake_request([1], 14, priority=1))
    life.submit(fake_request([2], 14, priority=1))
    launched(life)
    life.submit(fake_request(range(20, 30), 1, priority=-1))
    assert asked_for_a_commit_before_preempting(life)
    life.finish()


def test_a_fork_starts_at_the_commit_while_its_leader_is_ahead() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request([1, 2, 3], 4, n=2))
    launched(life)
    assert [chunk.tokens is None for chunk in launched(life).chunks] == [True]
    life.settle()
    step = launched(life)
    assert [(chunk.start, chunk.tokens is None) for chunk in step.chunks] == [(4, True), (2, False)]
    life.finish()
    for index in range(2):
        assert life.tokens[1, index] == expected_tokens(life.requests[1], index, vocab_size=100)


def test_a_dead_executor_frees_even_what_was_already_cancelled_in_flight() -> None:
    life = new_life(max_steps_in_flight=2)
    life.submit(fake_request([1, 2, 3], 8))
    life.submit(fake_request([4, 5, 6], 8))
    launched(life)
    launched(life)
    life.cancel(1, None)
    life.lose_the_executor()
    assert life.ended == {(1, 0): FinishReason.CANCELLED, (2, 0): FinishReason.FAILED}
    assert owned(life) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_running_ahead_changes_no_token(depth: int) -> None:
    life = new_life(max_steps_in_flight=depth, widths=(1, 2, 4), max_batched_tokens=9)
    for seed in range(6):
        sampling = SamplingParams(seed=seed, presence_penalty=0.5 * (seed % 2))
        life.submit(fake_request([seed, *range(seed)], 5, sampling=sampling))
    life.finish()
    assert set(life.ended.values()) == {FinishReason.LENGTH}

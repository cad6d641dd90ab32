"""Preempted sequences whose cells go to host memory and come back: who, when, and that no token changes."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import ForwardFailed, InvalidConfiguration, WorkerLost
from planner.limits import Limits
from planner.request import FinishReason, SamplingParams
from planner.step import Step, StepResult
from tests.fakes import expected_tokens, fake_request
from tests.planner_life import PlannerLife, new_life


def swapping_life(**changes: Any) -> PlannerLife:
    """A pool too small for two sequences that grow, and host memory for what gives way."""
    fields = {"capacity": 24, "max_num_seqs": 2, "swap_blocks": 8, "swap_block_cells": 4, "min_swapped_cells": 4}
    return new_life(**(fields | changes))


def run_until_swapped_out(life: PlannerLife) -> Step:
    """Two sequences, of which the second gives way; the step that carries its cells out."""
    life.submit(fake_request([1, 2, 3, 4, 5], 15))
    life.submit(fake_request([6, 7, 8, 9], 15))
    for _ in range(40):
        step, _ = life.step()
        if step.swaps_out:
            return step
    raise AssertionError("nobody was swapped out")


def test_a_swapped_sequence_goes_on_where_it_stopped_with_the_same_tokens() -> None:
    life = swapping_life(prefix_caching=False)
    (out,) = run_until_swapped_out(life).swaps_out
    assert len(out.blocks) == -(-len(out.cells) // 4)
    while life.planner.snapshot().num_waiting:
        step, _ = life.step()
    (back,) = step.swaps_in
    assert back.blocks.tolist() == out.blocks.tolist()
    assert len(back.cells) == len(out.cells)
    (chunk,) = [chunk for chunk in step.chunks if chunk.start]
    assert (chunk.start, chunk.length) == (len(out.cells), 1)
    life.finish()
    for request_id, request in life.requests.items():
        assert life.tokens[request_id, 0] == expected_tokens(request, vocab_size=100)
    metrics = life.planner.metrics
    assert metrics.num_preemptions == metrics.num_swapped_out == metrics.num_swapped_in == 1
    assert metrics.num_cells_swapped_out == metrics.num_cells_swapped_in == len(out.cells)


def test_nothing_of_a_swapped_sequence_is_computed_twice() -> None:
    fed = {}
    for swap_blocks in (0, 8):
        life = swapping_life(prefix_caching=False, swap_blocks=swap_blocks)
        for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9]):
            life.submit(fake_request(prompt, 15))
        life.finish()
        fed[swap_blocks] = life.planner.metrics.num_tokens.total()
    # Prompts and answers, but for the last token of each answer, which is never fed.
    assert fed[8] == 5 + 4 + 2 * 14 < fed[0]


def test_what_waits_for_its_copy_counts_only_new_tokens_as_queued() -> None:
    life = swapping_life(prefix_caching=False)
    run_until_swapped_out(life)
    assert life.planner.snapshot().num_waiting == 1
    assert life.planner.num_queued_tokens == 1


@pytest.mark.parametrize("changes", [{"swap_blocks": 0}, {"swap_blocks": 1}, {"min_swapped_cells": 20}])
def test_without_room_on_the_host_or_with_few_cells_it_recomputes(changes: dict[str, Any]) -> None:
    life = swapping_life(prefix_caching=False, **changes)
    life.submit(fake_request([1, 2, 3, 4, 5], 15))
    life.submit(fake_request([6, 7, 8, 9], 15))
    life.finish()
    assert life.planner.metrics.num_preemptions > 0
    assert life.planner.metrics.num_swapped_out == 0


def test_a_prompt_that_others_hold_stays_in_the_pool() -> None:
    """Two answers to one prompt: only what differs goes out, and the prompt is shared again afterwards."""
    life = swapping_life(capacity=20, prefix_caching=True)
    prompt = list(range(9))
    life.submit(fake_request(prompt, 10, sampling=SamplingParams(seed=3)))
    life.step()
    life.submit(fake_request(prompt, 10, sampling=SamplingParams(seed=4)))
    outs, ins = [], []
    for _ in range(60):
        if not life.planner.has_work:
            break
        step, _ = life.step()
        outs += step.swaps_out
        ins += step.swaps_in
    assert outs
    # Its own part of a block that begins inside of the prompt goes with it.
    assert all(len(out.cells) <= 10 - 1 + len(prompt) % 4 for out in outs)
    assert [len(back.cells) for back in ins] == [len(out.cells) for out in outs]
    life.finish()


def test_a_copy_whose_shared_prompt_is_gone_is_worth_nothing_and_all_is_recomputed() -> None:
    life = swapping_life(capacity=20, max_num_seqs=3, min_swapped_cells=2)
    prompt = list(range(9))
    first = life.submit(fake_request(prompt, 10, sampling=SamplingParams(seed=3)))
    life.step()
    life.submit(fake_request(prompt, 10, sampling=SamplingParams(seed=4)))
    assert first is not None
    while not life.planner.metrics.num_swapped_out:
        life.step()
    life.submit(fake_request(range(40, 59), 1, priority=-1))
    life.cancel(first, None)
    life.finish()
    assert life.ended[2, 0] is FinishReason.LENGTH
    assert life.planner.metrics.num_swapped_in == 0


def test_cells_that_did_not_come_back_are_no_prefix_of_others() -> None:
    """A pool that cannot grow has no room for them, and that a cancelled sequence failed is nobody's news."""
    life = swapping_life()
    run_until_swapped_out(life)
    while not (step := life.launch(None)) or not step.swaps_in:
        life.settle()
    (back,) = step.swaps_in
    computed = [6, 7, 8, 9, *life.tokens[2, 0]][: len(back.cells)]
    planner = life.planner
    assert back.sequence_id in {chunk.sequence_id for chunk in step.chunks}
    planner.cancel(2)
    planner.commit(step, StepResult([ForwardFailed("the pool has no memory for them")] * len(step.chunks)))
    planner.check()
    planner.submit(fake_request([*computed, 1], 1))
    again = planner.plan()
    assert again is not None
    assert [chunk.start for chunk in again.chunks] == [4], "of it all the prompt alone stayed where it was"


def test_blocks_of_a_cancelled_sequence_serve_others() -> None:
    life = swapping_life(prefix_caching=False, swap_blocks=4)
    for _ in range(3):
        run_until_swapped_out(life)
        life.cancel_all()
        life.check()
    life.finish()
    assert life.planner.metrics.num_swapped_out == 3


def test_sequences_swapped_out_when_the_executor_is_lost_end_and_leave_no_block_taken() -> None:
    life = swapping_life(prefix_caching=False, swap_blocks=4)
    run_until_swapped_out(life)
    updates = life.planner.fail_all(WorkerLost("the device is gone"))
    assert [update.finish_reason for update in updates] == [FinishReason.FAILED] * 2
    life.planner.check()
    assert not life.planner.has_work


def test_a_sequence_that_comes_back_beside_a_step_in_flight_is_not_disturbed_by_it() -> None:
    life = swapping_life(prefix_caching=False, max_steps_in_flight=2, max_num_seqs=3)
    for prompt in ([1, 2, 3, 4, 5], [6, 7, 8, 9], [10, 11]):
        life.submit(fake_request(prompt, 12))
    life.finish()
    assert life.planner.metrics.num_swapped_in > 0


def test_the_fake_pool_notices_a_swap_to_the_wrong_block() -> None:
    """Else the tests above would prove nothing."""
    life = swapping_life(prefix_caching=False)
    run_until_swapped_out(life)
    life.executor._host.spoil(life.executor._host_places(life.executor.steps[-1].swaps_out[0].blocks[1:]))
    with pytest.raises(AssertionError, match="hold"):
        life.finish()


def test_a_negative_number_of_blocks_is_refused_with_the_number() -> None:
    with pytest.raises(InvalidConfiguration, match="-1"):
        Limits(capacity=8, context=8, vocab_size=8, max_num_seqs=2, swap_blocks=-1)

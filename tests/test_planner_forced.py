"""Tokens that a grammar leaves no choice in: told with the token before them, and fed in one chunk.

The fake forces what would be drawn anyway, so that every answer is still the undisturbed one.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from planner.journal import JournaledPlanner
from planner.replay import replay
from planner.request import FinishReason, Request, SamplingParams
from planner.step import Chunk, ChunkOutput, StepResult, check_result
from tests.fakes import expected_tokens, fake_request
from tests.planner_life import PlannerLife, new_life

GRAMMAR = SamplingParams(grammar="5")


def forced_life(forced: tuple[int, ...], **limits: Any) -> PlannerLife:
    """The first token of an answer to a prompt of three is 7, and then `forced` follow."""
    script = {3 + place: token for place, token in enumerate((7, *forced))}
    life = new_life(script, **limits)
    life.executor.answer_wrongly(0, lambda outcomes: [with_forced(outcome, forced) for outcome in outcomes])
    return life


def with_forced(outcome: Any, forced: tuple[int, ...]) -> ChunkOutput:
    assert isinstance(outcome, ChunkOutput)
    return outcome._replace(forced=forced) if outcome.token == 7 else outcome


def grammar_request(max_tokens: int = 8, **changes: Any) -> Request:
    """The fake itself forces nothing here."""
    return fake_request([1, 2, 3], max_tokens, sampling=replace(GRAMMAR, grammar="0"), **changes)


def shape(chunk: Chunk) -> tuple[int, int, bool]:
    return chunk.start, chunk.length, chunk.samples


def test_forced_tokens_are_told_at_once_and_fed_in_one_chunk() -> None:
    life = forced_life((8, 9, 10))
    life.submit(grammar_request())
    _, updates = life.step()
    assert [update.tokens for update in updates] == [(7, 8, 9, 10)]
    step, _ = life.step()
    (chunk,) = step.chunks
    assert shape(chunk) == (3, 4, True)
    assert chunk.tokens is not None
    assert chunk.tokens.tolist() == [7, 8, 9, 10]
    assert chunk.history is not None
    assert chunk.history.tolist() == [1, 2, 3, 7, 8, 9, 10]
    assert life.planner.metrics.num_tokens_forced == 3
    life.finish()


def test_a_budget_that_ends_among_forced_tokens_ends_the_answer_there() -> None:
    life = forced_life((8, 9, 10))
    life.submit(grammar_request(max_tokens=3))
    _, (update,) = life.step()
    assert (update.tokens, update.finish_reason) == ((7, 8, 9), FinishReason.LENGTH)
    assert not life.planner.has_work
    life.finish()


def test_a_stop_token_among_forced_tokens_ends_the_answer_there() -> None:
    life = forced_life((8, 9, 10))
    life.submit(grammar_request(stop_token_ids=frozenset({9})))
    _, (update,) = life.step()
    assert (update.tokens, update.finish_reason) == ((7, 8, 9), FinishReason.STOP)
    life.finish()


def test_a_step_in_flight_that_draws_a_forced_token_again_tells_nothing_new() -> None:
    life = forced_life((8, 9, 10), max_steps_in_flight=2)
    life.submit(grammar_request())
    life.launch(None)
    ahead = life.launch(None)  # feeds the 7 that the host has not seen, and draws the 8 of its own
    assert ahead is not None
    assert shape(ahead.chunks[0]) == (3, 1, True)
    (update,) = life.settle()
    assert update.tokens == (7, 8, 9, 10)
    following = life.launch(None)
    assert following is not None
    assert shape(following.chunks[0]) == (4, 3, True)
    assert life.settle() == []
    life.finish()


def test_forced_tokens_leave_prompts_half_of_what_decodes_leave() -> None:
    life = forced_life((8, 9, 10), max_num_seqs=4, max_batched_tokens=8)
    life.submit(grammar_request())
    _, (update,) = life.step()
    assert update.tokens == (7, 8, 9)
    life.submit_prompts(20)
    step, _ = life.step()
    assert [shape(chunk)[:2] for chunk in step.chunks] == [(3, 3), (0, 5)]
    life.finish()


def test_where_a_step_has_room_for_decodes_alone_nothing_is_forced() -> None:
    life = forced_life((8, 9, 10), max_num_seqs=4, max_batched_tokens=5)
    life.submit(grammar_request())
    _, (update,) = life.step()
    assert update.tokens == (7,)
    assert life.planner.metrics.num_tokens_forced == 0
    life.finish()


def test_sequences_with_forced_tokens_take_turns_by_admission_where_a_step_has_room_for_one() -> None:
    life = forced_life((8, 9), max_num_seqs=4, max_batched_tokens=8)
    life.submit(grammar_request())
    life.submit(grammar_request())
    _, updates = life.step()
    assert [update.tokens for update in updates] == [(7, 8, 9)] * 2
    step, _ = life.step()
    assert [shape(chunk) for chunk in step.chunks] == [(3, 3, True)]
    step, _ = life.step()
    assert sorted(shape(chunk) for chunk in step.chunks) == [(3, 3, True), (6, 1, True)]
    life.finish()


def test_a_sequence_that_has_no_cells_for_forced_tokens_waits_and_computes_them_with_the_others() -> None:
    life = forced_life((8, 9, 10), capacity=10, prefix_caching=False)
    life.submit(grammar_request(max_tokens=6, priority=1))
    life.submit(fake_request([4] * 4, 6))
    life.step()
    step, _ = life.step()
    assert [shape(chunk)[:2] for chunk in step.chunks] == [(4, 1)]
    life.finish()
    assert life.planner.metrics.num_preemptions == 1
    again = [chunk for step in life.executor.steps[2:] for chunk in step.chunks if chunk.start == 0]
    assert [chunk.length for chunk in again] == [7]
    assert life.tokens[1, 0] == expected_tokens(life.requests[1], vocab_size=100, script=life.script)


@pytest.mark.parametrize(
    ("sampling", "outcome"),
    [
        (GRAMMAR, ChunkOutput(None, forced=(1,))),
        (GRAMMAR, ChunkOutput(1, forced=(1, 100))),
        (GRAMMAR, ChunkOutput(1, forced=(-1,))),
        (SamplingParams(), ChunkOutput(1, forced=(1,))),
        (replace(GRAMMAR, logprobs=0), ChunkOutput(1, forced=(1,))),
        (replace(GRAMMAR, bad_words=((1, 2),)), ChunkOutput(1, forced=(1,))),
    ],
    ids=["no token", "no such token", "a negative one", "no grammar", "log probabilities", "bad words"],
)
def test_forced_tokens_where_there_can_be_none_are_an_executors_fault(
    sampling: SamplingParams, outcome: ChunkOutput
) -> None:
    life = new_life()
    life.submit(fake_request([1, 2, 3], 4, sampling=sampling))
    step = life.planner.plan()
    assert step is not None
    with pytest.raises(ValueError, match=r"forced|samples"):
        check_result(step, StepResult([outcome]), 100)


def test_a_log_of_steps_knows_what_was_forced() -> None:
    lines: list[str] = []
    life = new_life()
    life.planner = JournaledPlanner(life.limits, lambda line: lines.append(json.dumps(line) + "\n"))
    for seed in range(3):
        life.submit(fake_request([1, 2, 3, seed], 12, sampling=replace(GRAMMAR, seed=seed)))
    life.finish()
    assert life.planner.metrics.num_tokens_forced > 3
    steps = list(replay(lines))
    assert len(steps) == life.planner.metrics.num_steps
    assert all(step.as_recorded for step in steps)

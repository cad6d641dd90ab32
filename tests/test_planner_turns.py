"""Who gets how many tokens of a step, and in which order (statements 54-66).

Turns differ from the reference on purpose: a chunk is cut to what is left of the budget instead of being skipped, and
the chunks that one sequence gets in a step are one chunk. So a sequence never has a decode and a chunk, or two decodes,
in one step (statements 59 and 60).
"""

from __future__ import annotations

from planner.slices import Method
from planner.step import Step
from tests.fakes import fake_request
from tests.planner_life import PlannerLife, new_life


def lengths(step: Step) -> list[tuple[int, int]]:
    """(sequence id, number of tokens) of each chunk; ids follow admission."""
    return [(chunk.sequence_id, chunk.length) for chunk in step.chunks]


def decoding(life: PlannerLife, num_sequences: int, max_tokens: int = 20) -> None:
    """Let this many sequences get as far as their first decode."""
    for token in range(num_sequences):
        life.submit(fake_request([token], max_tokens))
    life.step()


def test_no_more_sequences_run_than_may() -> None:
    """Statement 55: three decodes and a cap of two. Ours caps the running sequences, so each of them decodes on."""
    life = new_life(max_num_seqs=2)
    for token in range(3):
        life.submit(fake_request([token], 2))
    assert [[sequence for sequence, _ in lengths(life.step()[0])] for _ in range(4)] == [[1, 2], [1, 2], [3], [3]]


def test_decodes_come_first_in_admission_order() -> None:
    life = new_life()
    decoding(life, 3)
    life.submit_prompts(5)
    step, _ = life.step()
    assert lengths(step) == [(1, 1), (2, 1), (3, 1), (4, 5)]


def test_a_one_token_prompt_is_no_decode_and_comes_after_them() -> None:
    life = new_life()
    life.submit(fake_request(range(9), 4))
    life.submit(fake_request([7], 4))
    step, _ = life.step()
    assert lengths(step) == [(1, 9), (2, 1)]
    life.submit(fake_request([8], 4, priority=-1))
    assert lengths(life.step()[0]) == [(1, 1), (2, 1), (3, 1)]


def test_prompts_take_turns_and_spare_budget_goes_round_again() -> None:
    """Statement 57: four chunks of one sequence and two of another, two chunks a step."""
    life = new_life(max_batched_tokens=8, prefill_chunk_tokens=4)
    life.submit_prompts(16, 8)
    assert [lengths(life.step()[0]) for _ in range(3)] == [[(1, 4), (2, 4)], [(1, 4), (2, 4)], [(2, 1), (1, 7)]]


def test_a_chunk_is_cut_to_the_budget_and_goes_on_behind_the_others() -> None:
    """Statement 58: chunks of 4, 3, 4, 2, 4 and a budget of 9; the reference skips the third and takes the fourth."""
    life = new_life(max_batched_tokens=9, prefill_chunk_tokens=4, max_num_seqs=5)
    life.submit_prompts(4, 3, 4, 2, 4)
    assert lengths(life.step()[0]) == [(1, 4), (2, 3), (3, 2)]
    assert lengths(life.step()[0]) == [(1, 1), (2, 1), (4, 2), (5, 4), (3, 1)]


def test_every_prompt_gets_its_share() -> None:
    """Statement 63: three prompts of eight chunks, nine steps of two chunks: six each."""
    life = new_life(max_batched_tokens=8, prefill_chunk_tokens=4)
    life.submit_prompts(32, 32, 32)
    fed = {1: 0, 2: 0, 3: 0}
    for _ in range(9):
        for sequence, length in lengths(life.step()[0]):
            fed[sequence] += length
    assert fed == {1: 24, 2: 24, 3: 24}


def test_rejoining_does_not_give_two_turns() -> None:
    life = new_life(max_batched_tokens=8, prefill_chunk_tokens=4)
    life.submit_prompts(12, 12)
    life.step()
    life.cancel(1, None)
    life.submit_prompts(12)
    assert lengths(life.step()[0]) == [(2, 4), (3, 4)]


def test_long_prompt_cannot_hog_the_batch() -> None:
    life = new_life(prefill_chunk_tokens=4)
    life.submit_prompts(100, 6)
    assert lengths(life.step()[0]) == [(1, 10), (2, 6)]


def test_prefills_never_delay_a_decode_and_decodes_never_starve_prefills() -> None:
    life = new_life(max_batched_tokens=5)
    decoding(life, 3)
    life.submit_prompts(9)
    assert [lengths(life.step()[0]) for _ in range(3)] == [[(1, 1), (2, 1), (3, 1), (4, 2)]] * 3


def test_lower_priority_values_go_first_then_arrival() -> None:
    life = new_life(max_num_seqs=1, max_batched_tokens=8)
    ids = [life.submit(fake_request([token], 1, priority=priority)) for token, priority in enumerate([1, 0, -5, 0])]
    ended = []
    while life.planner.has_work:
        ended += [update.request_id for update in life.step()[1]]
    assert ended == [ids[2], ids[1], ids[3], ids[0]]


def test_prefills_of_a_better_class_take_their_turns_first() -> None:
    life = new_life(prefill_chunk_tokens=4, max_batched_tokens=8)
    life.submit_prompts(20, 20)
    life.step()
    life.submit(fake_request(range(6), 2, priority=-1))
    assert lengths(life.step()[0]) == [(3, 4), (1, 4)]


def test_lone_decodes_share_a_forward_of_the_ladder() -> None:
    life = new_life(widths=(1, 2, 4))
    decoding(life, 3)
    step, _ = life.step()
    assert [(piece.length, piece.method) for piece in step.slices] == [(3, Method.DECODE)]
    assert life.planner.metrics.num_padded_rows == 2  # one at the three one-token prompts, one now


def test_decodes_beside_a_prompt_run_in_its_prefill() -> None:
    life = new_life(widths=(1, 2, 4, 8))
    decoding(life, 3)
    life.submit_prompts(2)
    step, _ = life.step()
    assert [(piece.length, piece.method) for piece in step.slices] == [(5, Method.PREFILL)]


def test_short_chunks_of_one_prompt_never_share_a_decode() -> None:
    life = new_life(widths=(1, 2, 4, 8), min_prefill_tokens=5)
    life.submit_prompts(4)
    step, _ = life.step()
    assert [(piece.length, piece.method) for piece in step.slices] == [(1, Method.DECODE)] * 4

"""The parts of the CUDA executor that need no GPU: slots, tables of a prefill, and outcomes that are put together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from planner.errors import ForwardFailed
from planner.request import SamplingParams
from planner.step import Chunk, ChunkOutput
from worker.attention import Span
from worker.config import EngineConfig
from worker.cuda.decode_state import DecodeState, PendingTokens, SlotEntry
from worker.cuda.outcomes import Drawn, StepRun
from worker.cuda.prefill_plan import plan_prefill
from worker.cuda.slots import Slots, slots_needed
from worker.cuda.staging import Moment

GREEDY = SamplingParams(temperature=0.0)
CPU = torch.device("cpu")


def chunk(sequence_id: int, sampling: SamplingParams = GREEDY) -> Chunk:
    return Chunk(
        sequence_id=sequence_id,
        start=4,
        length=1,
        cells=np.arange(5, dtype=np.int32),
        tokens=np.array([1]),
        samples=True,
        sampling=sampling,
    )


def drawn(indices: list[int], tokens: list[int], bad: list[int] | None = None) -> Drawn:
    marks = np.array(bad or [0] * len(tokens), np.int32)
    return Drawn(indices, PendingTokens(np.array(tokens, np.int32), marks, Moment(CPU)))


def test_sequence_keeps_its_slot_until_it_is_dropped() -> None:
    slots = Slots(2)
    first, second = slots.take(10, GREEDY), slots.take(11, GREEDY)
    assert first != second
    assert slots.find(10) == first
    assert slots.num_free == 0
    slots.drop([10, 99])
    assert slots.find(10) is None
    assert slots.take(12, GREEDY) == first


def test_traits_of_a_slot_go_with_its_sequence() -> None:
    slots = Slots(3)
    plain, wild = slots.take(1, GREEDY), slots.take(2, SamplingParams(logprobs=1))
    assert not slots.any_random([plain])
    assert slots.any_random([plain, wild])
    assert slots.needing_logits([plain, wild]) == [1]
    slots.drop([2])
    assert slots.take(3, GREEDY) == wild
    assert not slots.any_random([plain, wild])
    assert slots.needing_logits([plain, wild]) == []


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logprobs=0),
        SamplingParams(logit_bias=((3, 1.0),)),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
    ],
)
def test_draws_that_the_device_cannot_make_alone_need_logits(sampling: SamplingParams) -> None:
    slots = Slots(1)
    assert slots.needing_logits([slots.take(1, sampling)]) == [0]


def test_every_place_may_have_a_sequence_that_is_not_dropped_yet() -> None:
    slots = Slots(slots_needed(3))
    for sequence_id in range(6):
        slots.take(sequence_id, GREEDY)
    with pytest.raises(IndexError):
        slots.take(6, GREEDY)


def test_entry_of_a_sequence_that_is_there_adds_only_its_new_cells() -> None:
    state = DecodeState(num_slots=2, max_rows=2, context=16, scratch_cell=99, device=CPU)
    state.enter([SlotEntry(1, 3, np.array([5, 6, 7], np.int32), 42, GREEDY)])
    state.enter([SlotEntry(1, 5, np.array([8, 9], np.int32), None, GREEDY, first=3)])
    assert state.table[1, :5].tolist() == [5, 6, 7, 8, 9]
    assert int(state.length[1]) == 5
    assert int(state.last_token[1]) == 42


@pytest.mark.parametrize("lengths", [[1], [3, 1, 5], [7, 2, 2, 9]])
def test_tables_of_a_prefill_start_where_every_kernel_wants_them(lengths: list[int]) -> None:
    spans, row = [], 0
    for length in lengths:
        spans.append(Span(row, 3, length, np.arange(3 + length, dtype=np.int32) + row))
        row += length
    plan = plan_prefill(spans, 2, CPU)
    for table in (
        plan.chunks,
        plan.cells,
        plan.positions,
        plan.new_cells,
        plan.wide_tiles,
        plan.long_tiles,
        plan.short_tiles,
    ):
        assert table.storage_offset() % 4 == 0
    assert plan.cells.tolist() == [cell for span in spans for cell in span.cells.tolist()]
    assert plan.positions.tolist() == [3 + i for length in lengths for i in range(length)]


def test_ladder_of_widths_has_what_lies_between_powers_where_an_idle_row_costs_time() -> None:
    config = EngineConfig(model="m", max_num_seqs=200)
    assert config.decode_widths == (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 200)
    assert EngineConfig(model="m", max_num_seqs=1).decode_widths == (1,)


def test_step_holds_a_full_prefill_and_twice_the_decodes_unless_told() -> None:
    assert EngineConfig(model="m", max_num_seqs=8).batched_tokens(8192) == 8192
    assert EngineConfig(model="m", max_num_seqs=300).batched_tokens(512) == 600
    assert EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=99).batched_tokens(8192) == 99


def test_outcomes_are_in_the_order_of_chunks_whatever_forward_drew_them() -> None:
    run = StepRun([chunk(1), chunk(2), chunk(3)])
    run.drawn += [drawn([0, 2], [7, 9]), drawn([1], [8])]
    assert run.outcomes() == [ChunkOutput(7), ChunkOutput(8), ChunkOutput(9)]


def test_what_is_forced_is_told_with_the_token_that_it_follows_and_with_no_other() -> None:
    run = StepRun([chunk(11), chunk(12), chunk(13), chunk(14)])
    run.drawn.append(drawn([0, 1, 2, 3], [7, 8, 9, 1], bad=[0, 0, 0, 1]))
    run.force(12, (8, 4, 5))
    run.force(13, (8, 4, 5))
    run.force(14, (1, 2))
    *fine, bad = run.outcomes()
    assert fine == [ChunkOutput(7), ChunkOutput(8, forced=(4, 5)), ChunkOutput(9)]
    assert isinstance(bad, ForwardFailed)


def test_row_that_is_not_finite_fails_alone() -> None:
    run = StepRun([chunk(1), chunk(2)])
    run.drawn.append(drawn([0, 1], [7, 0], bad=[0, 1]))
    first, second = run.outcomes()
    assert first == ChunkOutput(7)
    assert isinstance(second, ForwardFailed)


def test_chunk_of_a_failed_forward_has_its_error_and_no_token() -> None:
    run = StepRun([chunk(1), chunk(2)])
    run.fail([1], "no room")
    run.fail([1], "again")
    run.drawn.append(drawn([0], [7]))
    assert run.is_whole(0)
    assert not run.is_whole(1)
    first, second = run.outcomes()
    assert first == ChunkOutput(7)
    assert isinstance(second, ForwardFailed)
    assert second.message == "no room"


def test_scores_are_of_the_tokens_that_were_drawn() -> None:
    run = StepRun([chunk(1), chunk(2, SamplingParams(logprobs=1))])
    waiting = drawn([0, 1], [0, 2])
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    run.drawn.append(Drawn(waiting.indices, waiting.pending, [1], logits))
    plain, scored = run.outcomes()
    assert plain == ChunkOutput(0)
    assert isinstance(scored, ChunkOutput)
    assert scored.logprobs is not None
    expected = torch.log_softmax(logits[0], dim=-1)
    assert scored.logprobs.logprob == pytest.approx(float(expected[2]))
    assert [token for token, _ in scored.logprobs.top] == [1]


class FullTensor(torch.Tensor):
    """Logits of a device that has no memory for what is made of them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise torch.OutOfMemoryError("no room for it")


def test_scores_without_room_fail_only_who_wanted_them() -> None:
    run = StepRun([chunk(1), chunk(2, SamplingParams(logprobs=1)), chunk(3)])
    scored = torch.zeros(1, 4).as_subclass(FullTensor)
    run.drawn.append(Drawn([0, 1, 2], drawn([0, 1, 2], [5, 6, 7]).pending, [1], scored))
    first, second, third = run.outcomes()
    assert (first, third) == (ChunkOutput(5), ChunkOutput(7))
    assert isinstance(second, ForwardFailed)
    assert "log probabilities did not fit" in second.message

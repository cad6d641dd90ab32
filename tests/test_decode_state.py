"""Slots and rows of the decode state, without a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from planner.request import SamplingParams
from worker.cuda.decode_state import NO_ADAPTER, DecodeState, SlotEntry
from worker.cuda.staging import RING

CPU = torch.device("cpu")


def state() -> DecodeState:
    return DecodeState(num_slots=3, max_rows=4, context=8, scratch_cell=99, device=CPU)


def entry(slot: int, cells: list[int], token: int | None, sampling: SamplingParams | None = None) -> SlotEntry:
    return SlotEntry(slot, len(cells), np.array(cells, np.int32), token, sampling or SamplingParams())


def test_rows_that_nobody_uses_are_padding_from_the_start() -> None:
    fresh = state()
    assert fresh.row_slots.tolist() == [3, 3, 3, 3]
    assert fresh.new_cells.tolist() == [99, 99, 99, 99]
    fresh.set_rows([2, 0], [11, 12])
    assert fresh.row_slots.tolist() == [2, 0, 3, 3]
    assert fresh.new_cells.tolist() == [11, 12, 99, 99]
    fresh.set_rows([1], [13])
    assert fresh.row_slots.tolist() == [1, 3, 3, 3]
    assert fresh.new_cells.tolist() == [13, 99, 99, 99]


def test_rows_that_nobody_named_an_adapter_for_have_none() -> None:
    fresh = state()
    assert fresh.row_adapters.tolist() == [NO_ADAPTER] * 4
    fresh.set_rows([2, 0, 1], [11, 12, 13], [5, NO_ADAPTER, 0])
    assert fresh.row_adapters.tolist() == [5, NO_ADAPTER, 0, NO_ADAPTER]
    fresh.set_rows([2], [11], [3])
    assert fresh.row_adapters.tolist() == [3, NO_ADAPTER, NO_ADAPTER, NO_ADAPTER]
    fresh.set_rows([2, 1], [11, 12])
    assert fresh.row_adapters.tolist() == [NO_ADAPTER] * 4


def test_sequences_enter_their_slots_and_leave_the_others_alone() -> None:
    slots = state()
    sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=2**64 - 3)
    slots.enter([entry(1, [5, 6], 41)])
    slots.enter([entry(2, [7, 8, 9], 42, sampling), entry(0, [], 43)])
    assert slots.last_token.tolist()[:3] == [43, 41, 42]
    assert slots.length.tolist() == [0, 2, 3, 0]
    assert slots.table[1, :2].tolist() == [5, 6]
    assert slots.table[2, :3].tolist() == [7, 8, 9]
    assert slots.top_k.tolist()[1:3] == [0, 7]
    assert slots.seed.tolist()[2] % 2**64 == 2**64 - 3
    assert torch.allclose(slots.temperature[:3], torch.tensor([1.0, 1.0, 0.5]))
    assert torch.allclose(slots.top_p[1:3], torch.tensor([1.0, 0.9]))
    assert torch.allclose(slots.min_p[1:3], torch.tensor([0.0, 0.1]))


def test_token_that_never_visited_the_host_comes_from_the_device() -> None:
    slots = state()
    slots.enter([entry(0, [1], None), entry(1, [2], 9)])
    slots.set_last_tokens(torch.tensor([0]), torch.tensor([77]))
    assert slots.last_token.tolist()[:2] == [77, 9]


def test_fetched_tokens_outlive_the_next_steps_of_the_ring() -> None:
    slots = state()
    fetched = []
    for step in range(RING):
        slots.out_tokens[:] = step
        fetched.append(slots.fetch_tokens(2))
    for step, pending in enumerate(fetched):
        pending.wait()
        assert pending.tokens.tolist() == [step, step]
        assert pending.bad.tolist() == [0, 0]


def test_misuse_is_caught() -> None:
    slots = state()
    with pytest.raises(AssertionError):
        slots.set_rows([0, 0], [1, 2])
    with pytest.raises(AssertionError):
        slots.enter([entry(3, [1], 5)])
    with pytest.raises(AssertionError):
        slots.enter([entry(0, list(range(8)), 5)])

"""Cells that a step copies to host memory and back: the bytes, and a model's answers in a pool that is too small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import InvalidConfiguration
from planner.step import Step, SwapIn, SwapOut
from tests.tiny_models import greedy_answer, save_tiny_model
from tests.torch_rig import Rig, executor_of, load, request
from worker.config import EngineConfig
from worker.kv_pool import KvPool
from worker.program import build_executor
from worker.swap import HostSwap, blocks_in, run_swaps


def cells(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def test_cells_come_back_bytewise_into_other_cells_and_no_others_change() -> None:
    pool = KvPool(3, 20, 2, 4, torch.bfloat16, torch.device("cpu"))
    pool.keys.normal_()
    pool.values.normal_()
    keys, values = pool.keys.clone(), pool.values.clone()
    space = HostSwap(pool, 4, 3)
    gone, new, blocks = cells(7, 0, 3, 8, 4), cells(1, 2, 5, 6, 9), cells(3, 1)
    run_swaps(space, Step(1, (), (), swaps_out=(SwapOut(gone, blocks),)))
    pool.keys[:, gone], pool.values[:, gone] = 0, 0  # they are free at once
    run_swaps(space, Step(2, (), (), swaps_in=(SwapIn(1, blocks, new),)))
    for plane, before in ((pool.keys, keys), (pool.values, values)):
        before[:, new] = before[:, gone]
        before[:, gone] = 0
        assert torch.equal(plane, before)


def test_a_step_copies_out_before_it_copies_in() -> None:
    pool = KvPool(1, 4, 1, 1, torch.float32, torch.device("cpu"))
    pool.keys[0, :4, 0, 0] = torch.arange(4.0)
    space = HostSwap(pool, 2, 1)
    run_swaps(space, Step(1, (), (), swaps_out=(SwapOut(cells(0), cells(0)),)))
    run_swaps(space, Step(2, (), (), (), (SwapOut(cells(3), cells(1)),), (SwapIn(1, cells(0), cells(3)),)))
    run_swaps(space, Step(3, (), (), swaps_in=(SwapIn(1, cells(1), cells(2)),)))
    assert pool.keys[0, :4, 0, 0].tolist() == [0.0, 1.0, 3.0, 0.0]


def test_host_memory_is_given_out_in_whole_blocks() -> None:
    assert blocks_in(1.0, 128, 131_072) == 64
    assert blocks_in(0.0, 128, 131_072) == 0
    assert blocks_in(128 * 100 * 2.9 / 2**30, 128, 100) == 2


def test_answers_in_a_pool_that_is_too_small_are_the_same_and_nothing_is_computed_twice(tmp_path: Path) -> None:
    model = save_tiny_model("llama", tmp_path)
    program = load(str(tmp_path))
    prompts = [list(range(first, first + 9)) for first in (1, 20, 40, 60)]
    requests = [request(prompt, 20) for prompt in prompts]
    rig = Rig(executor_of(program, 60, swap_blocks=32), min_swapped_cells=4, prefix_caching=False)
    assert rig.answer(requests) == [[greedy_answer(model, prompt, 20)] for prompt in prompts]
    metrics = rig.planner.metrics
    assert metrics.num_swapped_in == metrics.num_swapped_out == metrics.num_preemptions > 0
    assert metrics.num_tokens.total() == 4 * (9 + 19)


@pytest.mark.parametrize(("space", "num_blocks"), [(None, 0), (0.0, 0), (0.01, 109)])
def test_swap_space_is_what_the_configuration_says(tmp_path: Path, space: float | None, num_blocks: int) -> None:
    save_tiny_model("llama", tmp_path)
    executor = build_executor(EngineConfig(model=str(tmp_path), device="cpu", num_threads=1, swap_space=space))
    assert executor.info.swap_blocks == num_blocks
    executor.close()


@pytest.mark.parametrize("space", [2.0**30, 1e300])
def test_more_swap_space_than_the_machine_has_memory_is_refused(tmp_path: Path, space: float) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(InvalidConfiguration, match="this machine's memory has") as refused:
        build_executor(EngineConfig(model=str(tmp_path), device="cpu", num_threads=1, swap_space=space))
    assert refused.value.param == "swap_space"

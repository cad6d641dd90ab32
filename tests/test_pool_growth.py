"""A pool that begins small: how it grows, that cells stay as they are, and that a growth that fails changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from planner.errors import InvalidConfiguration
from planner.step import Step, SwapIn
from tests.tiny_models import save_tiny_model
from tests.torch_rig import chunk
from worker.config import EngineConfig
from worker.kv_pool import KvPool
from worker.pool_growth import PoolGrowth, next_size, required_cells
from worker.program import build_executor


def small_pool(num_cells: int, dtype: torch.dtype = torch.bfloat16) -> KvPool:
    pool = KvPool(2, num_cells, 2, 8, dtype, torch.device("cpu"))
    pool.keys[:, :num_cells] = torch.randn(2, num_cells, 2, 8).to(dtype)
    pool.values[:, :num_cells] = torch.randn(2, num_cells, 2, 8).to(dtype)
    return pool


@pytest.mark.parametrize(
    ("num_cells", "required", "max_cells", "size"),
    [(4, 3, 32, 4), (4, 5, 32, 8), (8, 14, 32, 16), (16, 23, 32, 32), (4, 20, 64, 20), (20, 41, 64, 64), (4, 4, 4, 4)],
)
def test_a_pool_doubles_or_takes_what_is_needed_or_all(
    num_cells: int, required: int, max_cells: int, size: int
) -> None:
    assert next_size(num_cells, required, max_cells) == size


@pytest.mark.parametrize("max_cells", [7, 64, 1000, 1023, 1025])
@pytest.mark.parametrize("initial", [1, 3])
def test_old_and_new_pool_are_never_more_than_half_as_much_again_as_the_last(initial: int, max_cells: int) -> None:
    size = initial
    while size < max_cells:
        before, size = size, next_size(size, size + 1, max_cells)
        assert before + size <= 1.5 * max_cells


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_growth_keeps_cells_bytewise_and_gives_an_empty_scratch_cell(dtype: torch.dtype) -> None:
    pool = small_pool(5, dtype)
    keys, values = pool.keys.clone(), pool.values.clone()
    growth = PoolGrowth(pool, 32, lambda: None)
    growth.make_room(6)
    assert pool.num_cells == pool.scratch_cell == 10
    for plane, before in ((pool.keys, keys), (pool.values, values)):
        assert torch.equal(plane[:, :5].view(torch.uint8), before[:, :5].view(torch.uint8))
        assert not plane[:, pool.scratch_cell].any()
    assert growth.num_growths == 1
    assert not growth.is_done


def test_who_holds_addresses_is_told_after_the_bytes_have_moved_and_only_then() -> None:
    pool = small_pool(4)
    told: list[tuple[int, int]] = []
    growth = PoolGrowth(pool, 16, lambda: told.append((pool.num_cells, pool.keys.data_ptr())))
    growth.make_room(4)
    assert told == []
    growth.make_room(9)
    assert told == [(16, pool.keys.data_ptr())]
    assert growth.is_done


class CrampedPool(KvPool):
    """Has no memory for anything larger, while `is_full`."""

    is_full = True

    def grow(self, num_cells: int) -> None:
        if self.is_full:
            raise torch.OutOfMemoryError("no room for it")
        super().grow(num_cells)


def test_a_growth_that_fails_changes_nothing_and_may_be_tried_again() -> None:
    pool = CrampedPool(1, 4, 1, 2, torch.float32, torch.device("cpu"))
    told: list[int] = []
    growth = PoolGrowth(pool, 16, lambda: told.append(pool.num_cells))
    address = pool.keys.data_ptr()
    with pytest.raises(torch.OutOfMemoryError):
        growth.make_room(5)
    assert (pool.num_cells, pool.keys.data_ptr(), growth.num_growths, told) == (4, address, 0, [])
    pool.is_full = False
    growth.make_room(5)
    assert (pool.num_cells, growth.num_growths, told) == (8, 1, [8])


def test_a_step_needs_the_highest_cell_that_it_writes() -> None:
    chunks = (chunk([5], [90, 3], start=1), chunk([6, 7], [4, 8]))
    assert required_cells(Step(1, chunks, ())) == 9
    back = SwapIn(1, np.array([0], np.int32), np.array([30, 11], np.int32))
    assert required_cells(Step(1, chunks, (), swaps_in=(back,))) == 31
    assert required_cells(Step(1, (), ())) == 0


def test_a_pool_on_the_cpu_says_that_it_does_not_grow(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(InvalidConfiguration, match="kv_initial_cells is 9") as refusal:
        build_executor(EngineConfig(model=str(tmp_path), device="cpu", kv_initial_cells=9))
    assert refusal.value.param == "kv_initial_cells"

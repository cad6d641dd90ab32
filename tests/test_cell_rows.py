"""Scaled cell rows in plain torch: what eight bits keep of a head, and how rows lie in a pool."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidConfiguration
from planner.step import SwapIn, SwapOut
from tests.tiny_models import save_tiny_model
from worker.cell_image import CellLayout
from worker.cell_rows import SCALED, packed_rows, row_shape, unpacked_rows
from worker.config import EngineConfig
from worker.kv_pool import KvPool, bytes_per_cell
from worker.pool_port import PoolPort, TorchMover
from worker.program import build_executor
from worker.swap import HostSwap

CPU = torch.device("cpu")


def kept(heads: torch.Tensor) -> torch.Tensor:
    return unpacked_rows(packed_rows(heads), *heads.shape[1:])


@given(st.integers(0, 10_000), st.floats(1e-6, 1e6))
def test_a_number_is_off_by_a_sixteenth_or_by_a_millionth_of_its_heads_largest(seed: int, size: float) -> None:
    heads = torch.randn(5, 3, 20, generator=torch.Generator().manual_seed(seed)) * size
    largest = heads.abs().amax(-1, keepdim=True)
    most = torch.maximum(heads.abs() / 16, largest / 448 / 1000) * (1 + 1e-5)
    assert ((kept(heads) - heads).abs() <= most).all()


def test_the_largest_number_of_a_head_is_kept_and_a_small_head_loses_nothing_to_a_large_one() -> None:
    heads = torch.tensor([[[1.0, -3.0, 0.5, 0.25], [1e-5, 2e-5, 4e-5, 448e-5]]])
    together, alone = kept(heads), kept(heads[:, 1:])
    assert together[0, 0, 1] == -3.0
    assert torch.equal(together[:, 1:], alone)
    torch.testing.assert_close(alone, heads[:, 1:], rtol=1e-5, atol=0)


def test_heads_of_zeros_stay_zeros_and_heads_that_are_not_finite_show() -> None:
    heads = torch.zeros(3, 2, 8)
    heads[1, 0, 3], heads[2, 1, 0] = torch.nan, torch.inf
    back = kept(heads)
    assert not back[0].any()
    assert back[1, 0].isnan().all()
    assert back[2, 1].isnan().all()
    assert not back[1, 1].any()
    assert not back[2, 0].any()


@pytest.mark.parametrize(("heads", "dim", "size"), [(8, 128, 1056), (1, 64, 80), (3, 64, 208), (2, 20, 48)])
def test_rows_have_a_byte_a_number_and_a_scale_a_head_and_start_where_wide_loads_may(
    heads: int, dim: int, size: int
) -> None:
    assert row_shape(heads, dim, SCALED) == (1, size)
    assert size % 16 == 0
    assert bytes_per_cell(3, heads, dim, SCALED) == 2 * 3 * size
    pool = KvPool(3, 10, heads, dim, SCALED, CPU)
    assert pool.keys.shape == (3, 11, 1, size)
    keys, values = pool.layer(1)
    assert keys.shape == values.shape == (11, size)
    assert keys.dtype == SCALED
    assert keys.data_ptr() == pool.keys[1].data_ptr()


def test_rows_of_other_dtypes_are_the_heads_themselves() -> None:
    assert row_shape(8, 128, torch.bfloat16) == (8, 128)
    assert bytes_per_cell(2, 8, 128, torch.bfloat16) == 2 * 2 * 8 * 128 * 2


def test_rows_move_with_their_scales_when_a_pool_grows() -> None:
    pool = KvPool(2, 4, 2, 8, SCALED, CPU)
    heads = torch.randn(4, 2, 8)
    pool.keys[1, :4, 0] = packed_rows(heads)
    pool.grow(9)
    assert torch.equal(unpacked_rows(pool.keys[1, :4, 0], 2, 8), kept(heads))


def test_rows_leave_a_pool_and_enter_another_and_are_swapped_with_their_scales() -> None:
    layout = CellLayout(2, 2, 8, "fp8", bytes_per_cell(2, 2, 8, SCALED))
    here, there = (KvPool(2, 6, 2, 8, SCALED, CPU) for _ in range(2))
    heads = torch.randn(2, 6, 2, 8)
    for layer in range(2):
        here.keys[layer, :6, 0] = here.values[layer, :6, 0] = packed_rows(heads[layer])
    cells = np.array([4, 1], np.int32)
    image = PoolPort(TorchMover(here), layout).export(cells)
    PoolPort(TorchMover(there), layout).fill(cells[::-1].copy(), image)
    assert torch.equal(unpacked_rows(there.values[1, [1, 4], 0], 2, 8), kept(heads[1, [4, 1]]))
    swap, block = HostSwap(here, 1, 2), np.zeros(1, np.int32)
    swap.copy_out(SwapOut(cells, block))
    swap.copy_in(SwapIn(1, block, np.array([0, 5], np.int32)))
    assert torch.equal(unpacked_rows(here.keys[1, [0, 5], 0], 2, 8), kept(heads[1, [4, 1]]))


def test_a_cpu_and_quantized_layers_say_that_they_keep_the_models_numbers(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(InvalidConfiguration, match=r"kv_cache_dtype is fp8, .* which are float32") as refusal:
        build_executor(EngineConfig(model=str(tmp_path), device="cpu", kv_cache_dtype="fp8"))
    assert refusal.value.param == "kv_cache_dtype"
    same = EngineConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", kv_cache_dtype="bfloat16", max_cells=64)
    info = build_executor(same).info
    assert (info.cell_dtype, CellLayout.of(info).dtype) == (None, "bfloat16")

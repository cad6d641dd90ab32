"""Swap on the GPU: bytes through pinned memory in the order of the stream, and answers that stay the same. Runs on a
GPU; what needs no pinned memory also in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.request import Request, SamplingParams  # noqa: E402
from planner.step import SwapIn, SwapOut  # noqa: E402
from tests.cuda_rig import Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402

needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs pinned memory")


@needs_gpu
@pytest.mark.parametrize("num_cells", [1, 100, 256, 1000])
def test_cells_come_back_from_pinned_memory_as_they_went(num_cells: int) -> None:
    from worker.cuda.swap import PinnedSwap
    from worker.kernels import CellCopier

    planes = [torch.randn(3000, 8, 128, device="cuda").bfloat16() for _ in range(8)]
    order = np.random.default_rng(1).permutation(3000).astype(np.int32)
    cells, new_cells = order[:num_cells], order[num_cells : 2 * num_cells]
    expected = [plane[torch.from_numpy(cells).long().cuda()] for plane in planes]
    blocks = np.arange(16, dtype=np.int32)[::-1][: -(-num_cells // 64)].copy()
    space = PinnedSwap(CellCopier(planes), 16, 64)
    space.copy_out(SwapOut(cells, blocks))
    for plane in planes:  # the cells are free at once
        plane[torch.from_numpy(cells).long().cuda()] = 0
    space.copy_in(SwapIn(1, blocks, new_cells))
    for plane, before in zip(planes, expected, strict=True):
        assert torch.equal(plane[torch.from_numpy(new_cells).long().cuda()], before)


@needs_gpu
def test_blocks_that_came_back_may_be_filled_at_once() -> None:
    """Many swaps through few blocks and staging buffers, each started before the one before has ended."""
    from worker.cuda.swap import PinnedSwap
    from worker.kernels import CellCopier

    planes = [torch.arange(4096.0, device="cuda").view(-1, 1, 1).repeat(1, 8, 128) for _ in range(4)]
    space = PinnedSwap(CellCopier(planes), 8, 64)
    blocks = np.arange(8, dtype=np.int32)
    for first in range(0, 2048, 512):
        cells = np.arange(first, first + 512, dtype=np.int32)
        space.copy_out(SwapOut(cells, blocks))
        space.copy_in(SwapIn(1, blocks, cells + 2048))
    for plane in planes:
        assert torch.equal(plane[2048:], plane[:2048])


@pytest.mark.parametrize("depth", [1, 2])
def test_swapped_sequences_answer_as_undisturbed_ones(depth: int) -> None:
    model = tiny_model()
    num_tokens, count = (8, 3) if INTERPRETED else (40, 8)
    draw = np.random.default_rng(3)
    requests = [
        Request(
            draw.integers(0, 203, size=12),
            num_tokens,
            SamplingParams(seed=index) if index % 2 else SamplingParams(temperature=0.0),
        )
        for index in range(count)
    ]
    expected = Rig(torch_executor(model)).answer_alone(requests)
    executor = cuda_executor(model, num_cells=count * (12 + num_tokens) // 2, swap_blocks=64)
    rig = Rig(executor, depth=depth, min_swapped_cells=4, prefix_caching=False)
    assert rig.answer(requests) == expected
    metrics = rig.planner.metrics
    assert metrics.num_swapped_in == metrics.num_preemptions > 0
    assert metrics.num_tokens.total() == sum(len(each.prompt) + num_tokens - 1 for each in requests)

"""Host memory that preempted sequences' cells go to, and the plain way there: for pools that torch can index directly.

Which cells go, and to which block, is the planner's business; so is that no block is filled before what it held is
back. Not for GPUs, where copies run behind the model's kernels: `worker.cuda.swap`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planner.request import CellArray
from planner.step import Step, SwapIn, SwapOut
from worker.kv_pool import KvPool

GIB = 1 << 30


class SwapSpace(Protocol):
    """Blocks of host memory beside a pool. Owner and only caller: the executor.

    Each call takes effect in the order of calls and of the pool's other uses: cells that were copied out may be written
    at once by what is launched next, and what is launched next sees the cells that were copied in.
    """

    def copy_out(self, swap: SwapOut) -> None: ...

    def copy_in(self, swap: SwapIn) -> None: ...


def run_swaps(space: SwapSpace | None, step: Step) -> None:
    """The copies that a step begins with."""
    if not (step.swaps_out or step.swaps_in):
        return
    assert space is not None, "the planner swaps, and the program said that it has no blocks"
    for out in step.swaps_out:
        space.copy_out(out)
    for back in step.swaps_in:
        space.copy_in(back)


def blocks_in(gib: float, block_cells: int, cell_bytes: int) -> int:
    """Whole blocks that so much host memory holds."""
    return int(gib * GIB) // (block_cells * cell_bytes)


class HostSwap:
    """A `SwapSpace` that copies with torch, at once, and waits for it. Memory is taken from the system as blocks are
    first used."""

    def __init__(self, pool: KvPool, num_blocks: int, block_cells: int) -> None:
        self._pool = pool
        self._block_cells = block_cells
        shape = (pool.keys.shape[0], num_blocks * block_cells, *pool.keys.shape[2:])
        self._keys, self._values = (torch.empty(shape, dtype=pool.keys.dtype) for _ in "kv")

    def copy_out(self, swap: SwapOut) -> None:
        places, cells = self._places(swap.blocks, len(swap.cells)), _indices(swap.cells)
        self._keys[:, places] = self._pool.keys[:, cells].cpu()
        self._values[:, places] = self._pool.values[:, cells].cpu()

    def copy_in(self, swap: SwapIn) -> None:
        places, cells = self._places(swap.blocks, len(swap.cells)), _indices(swap.cells)
        device = self._pool.keys.device
        self._pool.keys[:, cells] = self._keys[:, places].to(device)
        self._pool.values[:, cells] = self._values[:, places].to(device)

    def _places(self, blocks: CellArray, num_cells: int) -> Tensor:
        """int64[num_cells]: rows of the host's tensors, block by block."""
        rows = blocks.astype(np.int64)[:, None] * self._block_cells + np.arange(self._block_cells)
        assert num_cells <= rows.size, "more cells than their blocks hold"
        return torch.from_numpy(rows.ravel()[:num_cells])


def _indices(cells: CellArray) -> Tensor:
    return torch.from_numpy(cells.astype(np.int64))

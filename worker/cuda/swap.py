# mypy: allow-untyped-calls
"""Takes cells to pinned host memory and back, behind the kernels that run meanwhile.

Blocks are gathered into a staging buffer on the current stream, as many at once as it holds, and copied over the bus on
a stream of its own, so the model's kernels run on; on the way back the other way round. Nothing here waits on the host.
What waits on the device: a gather while both staging buffers are on the bus, and what is launched after `copy_in`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from planner.request import CellArray
from planner.step import SwapIn, SwapOut
from worker.kernels import CellCopier, PackedCells

# Cells of a staging buffer: one launch on the host's side, and a few milliseconds of the bus.
STAGING_CELLS = 1024
# Host memory comes in slabs, since torch rounds what it pins up to a power of two.
_SLAB_BYTES = 1 << 30


class _Run(NamedTuple):
    """Blocks that one staging buffer holds, and the cells int32[n] on the device that fill them."""

    blocks: list[int]
    cells: Tensor


class PinnedSwap:
    """A `worker.swap.SwapSpace` for a pool on a GPU. Owner and caller: the thread that owns the pool.

    A block holds its cells plane by plane, as `CellCopier.gather` packs them. All copies over the bus are on one
    stream, in the order of the calls, so a block that was copied in may be filled again by the next call.
    """

    def __init__(self, copier: CellCopier, num_blocks: int, block_cells: int) -> None:
        """Pins `num_blocks` blocks of `block_cells` cells. Raises RuntimeError where the host has not that much."""
        assert block_cells > 0
        self._copier = copier
        self._block_cells = block_cells
        self._cell_bytes = copier.num_planes * copier.row_bytes
        block_bytes = block_cells * self._cell_bytes
        self._blocks = [block for slab in _slabs(num_blocks, block_bytes) for block in slab.view(-1, block_bytes)]
        self._bus = torch.cuda.Stream(device=copier.device)
        self._run_blocks = max(1, min(num_blocks, STAGING_CELLS // block_cells))
        # Each with the moment when whoever used it last was done.
        self._staging = [(copier.buffer(self._run_blocks * block_cells), torch.cuda.Event()) for _ in range(2)]
        self._turn = 0

    def rebind(self, copier: CellCopier) -> None:
        """The pool has moved; its cells are as many bytes as before."""
        assert copier.num_planes * copier.row_bytes == self._cell_bytes
        self._copier = copier

    def copy_out(self, swap: SwapOut) -> None:
        current = torch.cuda.current_stream(self._copier.device)
        for run in self._runs(swap.blocks, self._upload(swap.cells)):
            packed, free = self._next()
            current.wait_event(free)
            self._copier.gather(run.cells, packed, self._block_cells)
            self._bus.wait_stream(current)
            with torch.cuda.stream(self._bus):
                for host, device in self._pairs(run, packed):
                    host.copy_(device, non_blocking=True)
            free.record(self._bus)

    def copy_in(self, swap: SwapIn) -> None:
        current = torch.cuda.current_stream(self._copier.device)
        for run in self._runs(swap.blocks, self._upload(swap.cells)):
            packed, free = self._next()
            self._bus.wait_event(free)
            with torch.cuda.stream(self._bus):
                for host, device in self._pairs(run, packed):
                    device.copy_(host, non_blocking=True)
            current.wait_stream(self._bus)
            self._copier.scatter(packed, run.cells, self._block_cells)
            free.record(current)

    def join(self) -> None:
        """What is launched next on the current stream waits for all that is on the bus."""
        torch.cuda.current_stream(self._copier.device).wait_stream(self._bus)

    def _next(self) -> tuple[PackedCells, torch.cuda.Event]:
        self._turn = (self._turn + 1) % len(self._staging)
        return self._staging[self._turn]

    def _runs(self, blocks: CellArray, cells: Tensor) -> Iterator[_Run]:
        assert len(cells) <= len(blocks) * self._block_cells, "more cells than their blocks hold"
        for first in range(0, len(blocks), self._run_blocks):
            chosen = blocks[first : first + self._run_blocks].tolist()
            yield _Run(chosen, cells[first * self._block_cells :][: len(chosen) * self._block_cells])

    def _pairs(self, run: _Run, packed: PackedCells) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of each block on the host, and in the staging buffer."""
        block_bytes = self._block_cells * self._cell_bytes
        staged = packed.storage[: len(run.cells) * self._cell_bytes].split(block_bytes)
        for block, device in zip(run.blocks, staged, strict=True):
            yield self._blocks[block][: len(device)], device

    def _upload(self, cells: CellArray) -> Tensor:
        return torch.from_numpy(cells.copy()).pin_memory().to(self._copier.device, non_blocking=True)


def _slabs(num_blocks: int, block_bytes: int) -> Iterator[Tensor]:
    most = max(1, _SLAB_BYTES // block_bytes)
    for first in range(0, num_blocks, most):
        size = min(most, num_blocks - first) * block_bytes
        yield torch.empty(size, dtype=torch.uint8, pin_memory=True)

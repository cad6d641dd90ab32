# mypy: allow-untyped-calls
"""Takes cells to pinned host memory and back, behind the kernels that run meanwhile.

A block is gathered into a staging buffer on the current stream and copied over the bus on a stream of its own, so the
model's kernels run on; on the way back the other way round. Nothing here waits on the host. What waits on the device:
a gather where all staging buffers are still on the bus, and whatever is launched after `copy_in` for its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from planner.request import CellArray
from planner.step import SwapIn, SwapOut
from worker.kernels import CellCopier, PackedCells

# Bytes that may be on the bus before the device waits for it: a sequence of a thousand cells of an 8B model.
_STAGING_BYTES = 128 << 20
# Host memory comes in slabs, since torch rounds what it pins up to a power of two.
_SLAB_BYTES = 1 << 30


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
        num_staging = max(2, min(num_blocks, _STAGING_BYTES // block_bytes))
        # Each with the moment when whoever used it last was done.
        self._staging = [(copier.buffer(block_cells), torch.cuda.Event()) for _ in range(num_staging)]
        self._turn = 0

    def rebind(self, copier: CellCopier) -> None:
        """The pool has moved; its cells are as many bytes as before."""
        assert copier.num_planes * copier.row_bytes == self._cell_bytes
        self._copier = copier

    def copy_out(self, swap: SwapOut) -> None:
        current = torch.cuda.current_stream(self._copier.device)
        cells = self._upload(swap.cells)
        for block, piece in self._pieces(swap.blocks, cells):
            packed, free = self._next()
            current.wait_event(free)
            self._copier.gather(piece, packed)
            self._bus.wait_stream(current)
            with torch.cuda.stream(self._bus):
                size = len(piece) * self._cell_bytes
                block[:size].copy_(packed.storage[:size], non_blocking=True)
            free.record(self._bus)

    def copy_in(self, swap: SwapIn) -> None:
        current = torch.cuda.current_stream(self._copier.device)
        cells = self._upload(swap.cells)
        for block, piece in self._pieces(swap.blocks, cells):
            packed, free = self._next()
            self._bus.wait_event(free)
            with torch.cuda.stream(self._bus):
                size = len(piece) * self._cell_bytes
                packed.storage[:size].copy_(block[:size], non_blocking=True)
            current.wait_stream(self._bus)
            self._copier.scatter(packed, piece)
            free.record(current)

    def join(self) -> None:
        """What is launched next on the current stream waits for all that is on the bus."""
        torch.cuda.current_stream(self._copier.device).wait_stream(self._bus)

    def _next(self) -> tuple[PackedCells, torch.cuda.Event]:
        self._turn = (self._turn + 1) % len(self._staging)
        return self._staging[self._turn]

    def _pieces(self, blocks: CellArray, cells: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(host block, cells that it holds), in order."""
        assert len(cells) <= len(blocks) * self._block_cells, "more cells than their blocks hold"
        return zip((self._blocks[block] for block in blocks.tolist()), cells.split(self._block_cells), strict=True)

    def _upload(self, cells: CellArray) -> Tensor:
        return torch.from_numpy(cells.copy()).pin_memory().to(self._copier.device, non_blocking=True)


def _slabs(num_blocks: int, block_bytes: int) -> Iterator[Tensor]:
    most = max(1, _SLAB_BYTES // block_bytes)
    for first in range(0, num_blocks, most):
        size = min(most, num_blocks - first) * block_bytes
        yield torch.empty(size, dtype=torch.uint8, pin_memory=True)

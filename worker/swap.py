# mypy: allow-untyped-calls
"""Takes cells to pinned host memory and back, behind the kernels that run meanwhile.

A piece is gathered into one of two device buffers on the current stream and copied over the bus on a stream of its
own, so the next piece's kernel and the model's own kernels run on. Nothing here waits on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kernels import CellCopier, PackedCells


@dataclass(frozen=True, slots=True)
class Swapped:
    """Cells that live in host memory: pinned `storage` uint8, `num_cells` of them, there once `done` has happened."""

    storage: Tensor
    num_cells: int
    done: torch.cuda.Event


class SwapBuffer:
    """Two device buffers of `piece_cells` cells each. Owner and caller: the thread that owns the pool."""

    def __init__(self, copier: CellCopier, piece_cells: int) -> None:
        assert piece_cells > 0
        self._copier = copier
        self._piece_cells = piece_cells
        self._bus = torch.cuda.Stream(device=copier.device)
        self._halves: tuple[tuple[PackedCells, torch.cuda.Event], ...] = tuple(
            (copier.buffer(piece_cells), torch.cuda.Event()) for _ in range(2)
        )

    def out(self, cells: Tensor) -> Swapped:
        """Start copying `cells`, int32[n] on the device, to fresh pinned memory.

        In the order of the current stream the cells are free for other use as soon as this returns.
        """
        num_cells, cell_bytes = len(cells), self._copier.num_planes * self._copier.row_bytes
        storage = torch.empty(num_cells * cell_bytes, dtype=torch.uint8, pin_memory=True)
        current = torch.cuda.current_stream(self._copier.device)
        for number, first in enumerate(range(0, num_cells, self._piece_cells)):
            packed, free = self._halves[number % 2]
            piece = cells[first : first + self._piece_cells]
            current.wait_event(free)
            self._copier.gather(piece, packed)
            self._bus.wait_stream(current)
            with torch.cuda.stream(self._bus):
                size = len(piece) * cell_bytes
                storage[first * cell_bytes :][:size].copy_(packed.storage[:size], non_blocking=True)
                free.record()
        done = torch.cuda.Event()
        done.record(self._bus)
        return Swapped(storage, num_cells, done)

    def back(self, swapped: Swapped, cells: Tensor) -> torch.cuda.Event:
        """Start copying swapped cells into `cells`, int32[n] on the device; later work of the current stream sees
        them. The event says when `swapped.storage` may be dropped."""
        assert len(cells) == swapped.num_cells
        cell_bytes = self._copier.num_planes * self._copier.row_bytes
        current = torch.cuda.current_stream(self._copier.device)
        self._bus.wait_event(swapped.done)
        for number, first in enumerate(range(0, len(cells), self._piece_cells)):
            packed, free = self._halves[number % 2]
            piece = cells[first : first + self._piece_cells]
            self._bus.wait_event(free)
            with torch.cuda.stream(self._bus):
                size = len(piece) * cell_bytes
                packed.storage[:size].copy_(swapped.storage[first * cell_bytes :][:size], non_blocking=True)
            current.wait_stream(self._bus)
            self._copier.scatter(packed, piece)
            free.record(current)
        read = torch.cuda.Event()
        read.record(self._bus)
        return read

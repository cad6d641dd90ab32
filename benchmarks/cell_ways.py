# mypy: allow-untyped-calls
"""Ways of cells from one process's pool to another's on the same host, beside plain bytes (`worker.pool_port`).

Both ends gather and scatter with the pool's own kernels. Not a part of the service, whose data plane has no message for
cells yet; `benchmarks.two_gpus_cells` measures what such a message could use.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from planner.request import CellArray
from worker.cell_image import CellLayout
from worker.pool_port import CellMover

PIECE_CELLS = 512
_COUNTER_BYTES = 4096
_PATIENCE_S = 30.0


class CellWay(Protocol):
    """One end of a way. `send` at the one end and `receive` at the other, with as many cells; each ends when its device
    is done."""

    def send(self, cells: CellArray) -> None: ...

    def receive(self, cells: CellArray) -> None: ...


class SharedHostMemory:
    """Through host memory that both processes map and, on a GPU, both have pinned: out and in by piece, side by side.

    The file begins with the number of pieces that have come into it; the sender's end sets it to 0 between transfers.
    """

    def __init__(self, path: Path, num_bytes: int, mover: CellMover, layout: CellLayout, device: torch.device) -> None:
        """Maps the file, which is made where it is missing. Raises RuntimeError where the driver does not pin it."""
        self._mover, self._layout, self._device = mover, layout, device
        with path.open("ab") as file:
            os.truncate(file.fileno(), _COUNTER_BYTES + num_bytes)
        mapped = np.memmap(path, np.uint8, "r+")
        self._num_sent = mapped[:8].view(np.int64)
        self._data = torch.from_numpy(mapped)[_COUNTER_BYTES:]
        if device.type == "cuda":
            error = torch.cuda.cudart().cudaHostRegister(torch.from_numpy(mapped).data_ptr(), mapped.size, 0)
            if int(error) != 0:
                raise RuntimeError(f"{mapped.size} bytes of shared memory could not be pinned: CUDA error {error}")

    def reset(self) -> None:
        self._num_sent[0] = 0

    def send(self, cells: CellArray) -> None:
        events = []
        for piece, place in self._pieces(cells):
            place.copy_(self._mover.read(piece).view(-1), non_blocking=True)
            if self._device.type == "cuda":
                event = torch.cuda.Event()
                event.record()
                events.append(event)
        for number, event in enumerate(events, 1):
            event.synchronize()
            self._num_sent[0] = number
        self._num_sent[0] = -(-len(cells) // PIECE_CELLS)

    def receive(self, cells: CellArray) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        for number, (piece, place) in enumerate(self._pieces(cells), 1):
            while self._num_sent[0] < number:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"piece {number} has not come within {_PATIENCE_S} s")
            rows = place.to(self._device, non_blocking=True)
            self._mover.write(piece, rows.view(2 * self._layout.num_layers, len(piece), -1))
        _wait(self._device)

    def _pieces(self, cells: CellArray) -> Iterator[tuple[CellArray, Tensor]]:
        for first in range(0, len(cells), PIECE_CELLS):
            piece = cells[first : first + PIECE_CELLS]
            start = first * self._layout.cell_bytes
            yield piece, self._data[start : start + len(piece) * self._layout.cell_bytes]


class Peers:
    """From device to device through torch.distributed, whose group of two has been made: NCCL between GPUs, Gloo
    between CPUs."""

    def __init__(self, other_rank: int, mover: CellMover, layout: CellLayout, device: torch.device) -> None:
        self._other, self._mover, self._layout, self._device = other_rank, mover, layout, device

    def send(self, cells: CellArray) -> None:
        dist.send(self._mover.read(cells).view(-1), self._other)
        _wait(self._device)

    def receive(self, cells: CellArray) -> None:
        rows = torch.empty(len(cells) * self._layout.cell_bytes, dtype=torch.uint8, device=self._device)
        dist.recv(rows, self._other)
        self._mover.write(cells, rows.view(2 * self._layout.num_layers, len(cells), -1))
        _wait(self._device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""A pool's port: cells out to plain bytes and in again, piece by piece. See `worker.cell_image`.

Used when a sequence moves between workers, which waits for the network anyway; so it waits for the device too. What
must run behind the model's kernels is `worker.cuda.swap`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planner.request import CellArray
from worker.cell_image import CellImage, CellLayout
from worker.kv_pool import KvPool

# Cells that move at once: bounds what the device holds twice.
_PIECE_CELLS = 1024


class CellMover(Protocol):
    """Moves a piece of cells, uint8[2 * num_layers, n, row bytes]: keys of all layers, then their values."""

    def read(self, cells: CellArray) -> Tensor: ...

    def write(self, cells: CellArray, rows: Tensor) -> None: ...


class PoolPort:
    """A `worker.cell_image.CellPort`. The pool may grow between calls."""

    def __init__(
        self, mover: CellMover, layout: CellLayout, make_room: Callable[[int], None] = lambda num_cells: None
    ) -> None:
        """`make_room` has the pool hold at least so many cells before any beyond its end is filled; `fill` raises what
        it raises."""
        self._mover = mover
        self._layout = layout
        self._make_room = make_room

    @property
    def layout(self) -> CellLayout:
        return self._layout

    @property
    def mover(self) -> CellMover:
        """For whoever takes cells another way than over plain bytes."""
        return self._mover

    def export(self, cells: CellArray) -> CellImage:
        data = np.empty(len(cells) * self._layout.cell_bytes, np.uint8)
        planes = data.reshape(2 * self._layout.num_layers, len(cells), -1) if len(cells) else data
        with torch.inference_mode():
            for first in range(0, len(cells), _PIECE_CELLS):
                piece = self._mover.read(cells[first : first + _PIECE_CELLS])
                planes[:, first : first + _PIECE_CELLS] = piece.cpu().numpy()
        return CellImage(self._layout, len(cells), data)

    def fill(self, cells: CellArray, image: CellImage) -> None:
        image.check(self._layout, cells)
        if len(cells):
            self._make_room(int(cells.max()) + 1)
        planes = image.data.reshape(2 * self._layout.num_layers, len(cells), -1) if len(cells) else image.data
        with torch.inference_mode():
            for first in range(0, len(cells), _PIECE_CELLS):
                piece = planes[:, first : first + _PIECE_CELLS].copy()
                self._mover.write(cells[first : first + _PIECE_CELLS], torch.from_numpy(piece))


class TorchMover:
    """For any pool that torch can index."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def read(self, cells: CellArray) -> Tensor:
        chosen = self._indices(cells)
        planes = (self._pool.keys, self._pool.values)
        return torch.cat([_bytes(plane).index_select(1, chosen) for plane in planes])

    def write(self, cells: CellArray, rows: Tensor) -> None:
        chosen = self._indices(cells)
        for plane, half in zip((self._pool.keys, self._pool.values), rows.chunk(2), strict=True):
            _bytes(plane).index_copy_(1, chosen, half.to(plane.device))

    def _indices(self, cells: CellArray) -> Tensor:
        return torch.from_numpy(cells.astype(np.int64)).to(self._pool.keys.device)


def _bytes(plane: Tensor) -> Tensor:
    """uint8[num_layers, num_cells + 1, row bytes] over the same memory."""
    return plane.view(torch.uint8).flatten(2)

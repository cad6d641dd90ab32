"""Moves pieces of cells between a pool on a GPU and the host with the cell-copy kernels; see `worker.pool_port`."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.request import CellArray
from worker.kernels import CellCopier
from worker.kv_pool import KvPool


class CudaMover:
    """A `worker.pool_port.CellMover`. Ordered on the current stream. Views of the pool are taken at each call: a
    pool may have grown, and beside a transfer between workers they cost nothing."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool

    def read(self, cells: CellArray) -> Tensor:
        copier = self._copier()
        packed = copier.buffer(len(cells))
        copier.gather(torch.from_numpy(cells.copy()), packed)
        return packed.storage.view(copier.num_planes, len(cells), copier.row_bytes)

    def write(self, cells: CellArray, rows: Tensor) -> None:
        copier = self._copier()
        copier.scatter(copier.packed(rows.to(copier.device).contiguous().view(-1)), torch.from_numpy(cells.copy()))

    def _copier(self) -> CellCopier:
        return CellCopier([*self._pool.keys, *self._pool.values])

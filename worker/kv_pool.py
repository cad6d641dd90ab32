"""The bytes behind cells: keys and values of every layer. Which cell belongs to whom is the planner's business."""

from __future__ import annotations

import torch
from torch import Tensor

from planner.errors import InvalidConfiguration
from worker.cell_rows import SCALED, row_shape, storage_dtype
from worker.machine import host_bytes


class KvPool:
    """Per layer K and V `[num_cells + 1, num_kv_heads, head_dim]`, or of scaled rows as bytes `[num_cells + 1, 1, row]`
    where `dtype` is float8_e4m3fn (`worker.cell_rows`). Owner: the executor.

    The last cell is scratch: padding reads it (it starts as zeros) and nothing depends on what it holds. Other cells
    are not initialised, so on the CPU a cell that was never written costs no memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_cells: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises `InvalidConfiguration` for a pool larger than this machine's memory, and torch's `OutOfMemoryError`
        where a GPU has no room."""
        if device.type == "cpu":
            _check_memory(num_cells, (num_cells + 1) * bytes_per_cell(num_layers, num_kv_heads, head_dim, dtype))
        self.num_cells = num_cells
        self.keys, self.values = (
            _cells(num_layers, num_cells, row_shape(num_kv_heads, head_dim, dtype), storage_dtype(dtype), device)
            for _ in ("keys", "values")
        )
        self.dtype = dtype

    @property
    def scratch_cell(self) -> int:
        return self.num_cells

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as its kernels take them: scaled rows as float8_e4m3fn[num_cells + 1, row]."""
        keys, values = self.keys[index], self.values[index]
        if self.dtype != SCALED:
            return keys, values
        return keys.view(SCALED).squeeze(1), values.view(SCALED).squeeze(1)

    def grow(self, num_cells: int) -> None:
        """Move to tensors of `num_cells` cells, more than before; what cells hold stays, byte by byte.

        Ordered on the current stream. The scratch cell moves to the new end. Raises torch's `OutOfMemoryError` where
        old and new tensors do not fit side by side; nothing has changed then.
        """
        assert num_cells > self.num_cells
        num_layers, _, *row = self.keys.shape
        kind = num_layers, num_cells, (row[0], row[1]), self.keys.dtype, self.keys.device
        keys, values = _cells(*kind), _cells(*kind)
        keys[:, : self.num_cells] = self.keys[:, : self.num_cells]
        values[:, : self.num_cells] = self.values[:, : self.num_cells]
        self.keys, self.values, self.num_cells = keys, values, num_cells

    def write(self, layer: int, cells: Tensor, key: Tensor, value: Tensor) -> None:
        """Put row i of `key` and `value` [T, num_kv_heads, head_dim] into cell `cells[i]`, int64[T]. Not for scaled
        rows, which only kernels write."""
        assert self.dtype != SCALED
        self.keys[layer].index_copy_(0, cells, key)
        self.values[layer].index_copy_(0, cells, value)


def _cells(num_layers: int, num_cells: int, row: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    tensor = torch.empty((num_layers, num_cells + 1, *row), dtype=dtype, device=device)
    tensor[:, num_cells] = 0
    return tensor


def _check_memory(num_cells: int, num_bytes: int) -> None:
    """On a CPU memory is given when it is first written to: a pool that can never be filled would be found too late."""
    there_are = host_bytes()
    if num_bytes > there_are:
        raise InvalidConfiguration(
            f"a pool of {num_cells} cells takes {num_bytes} bytes, and this machine's memory has {there_are}: lower "
            "max_cells or max_model_len",
            param="max_cells",
        )


def bytes_per_cell(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """K and V of one token in all layers."""
    heads, size = row_shape(num_kv_heads, head_dim, dtype)
    return 2 * num_layers * heads * size * dtype.itemsize

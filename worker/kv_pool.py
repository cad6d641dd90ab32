"""The bytes behind cells: keys and values of every layer. Which cell belongs to whom is the planner's business."""

from __future__ import annotations

import torch
from torch import Tensor


class KvPool:
    """Per layer K and V `[num_cells + 1, num_kv_heads, head_dim]`. Owner: the executor.

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
        shape = (num_layers, num_cells + 1, num_kv_heads, head_dim)
        self.num_cells = num_cells
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.keys[:, self.scratch_cell] = 0
        self.values[:, self.scratch_cell] = 0

    @property
    def scratch_cell(self) -> int:
        return self.num_cells

    def write(self, layer: int, cells: Tensor, key: Tensor, value: Tensor) -> None:
        """Put row i of `key` and `value` [T, num_kv_heads, head_dim] into cell `cells[i]`, int64[T]."""
        self.keys[layer].index_copy_(0, cells, key)
        self.values[layer].index_copy_(0, cells, value)


def bytes_per_cell(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """K and V of one token in all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize

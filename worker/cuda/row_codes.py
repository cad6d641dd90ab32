"""Where a decode step keeps its rows as products of fp8 take them. One product's at a time: the next one overwrites."""

from __future__ import annotations

import torch
from torch import Tensor

from worker.cuda.fp8 import E4M3


class RowCodes:
    """Of up to `rows` rows, padding included, of up to `columns` numbers; `scales` float32 [rows]."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._codes = torch.zeros(rows * columns, dtype=torch.uint8, device=device).view(E4M3)
        self.scales = torch.zeros(rows, dtype=torch.float32, device=device)

    def of(self, columns: int) -> Tensor:
        """e4m3 [rows, columns], over the same memory for any number of columns."""
        return self._codes[: len(self.scales) * columns].view(len(self.scales), columns)

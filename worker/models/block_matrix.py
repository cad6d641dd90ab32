"""A matrix of a decoder that stays in blocks, in the place of a tensor of its values.

`torch.nn.functional.embedding` takes it as its weight as `linear` does, so that it may be both ends of a decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from worker.models.blocks import Tiles
from worker.models.stored_matrix import StoredMatrix


class BlockMatrix(StoredMatrix):
    """[N, K] of dtype float32, on the CPU."""

    tiles: Tiles

    @staticmethod
    def __new__(cls, tiles: Tiles) -> BlockMatrix:
        shape = (tiles.num_rows, tiles.num_columns)
        matrix: BlockMatrix = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=torch.device("cpu"))
        matrix.tiles = tiles
        return matrix

    def __init__(self, tiles: Tiles) -> None:
        """Keeps `tiles`, which are not copied."""

    @classmethod
    def _operations(cls) -> Mapping[Callable[..., Any], Callable[..., Tensor]]:
        return {**super()._operations(), functional.embedding: _embedding}

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from worker.cpu.blocks import product  # loads numba, which no other matrix needs

        rows = product(x.reshape(-1, x.shape[-1]), self.tiles, bias)
        return rows.reshape(*x.shape[:-1], len(self))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockMatrix({self.tiles.num_rows} x {self.tiles.num_columns}, {self.tiles.layout})"


def _embedding(tokens: Tensor, weight: BlockMatrix, max_norm: float | None = None, **options: Any) -> Tensor:
    """`tokens` int64[T] to [T, K]. Options are those of training, but for one that would change the values."""
    assert max_norm is None
    return torch.from_numpy(weight.tiles.values(tokens.numpy()))

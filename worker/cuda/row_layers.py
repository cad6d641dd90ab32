"""A layer of a decode step of one row: products that have norms and residual sums within them.

For one model over one set of buffers. The kernels are `worker.cuda.gemv`'s, or `packed_gemv`'s for packed matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_plan import DecodePlan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.gemv import normed_gate_up_gemv_kernel, normed_gemv_kernel, residual_gemv_kernel
from worker.cuda.packed import PackedMatrix, packed_matrices
from worker.cuda.packed_products import gate_up_gemv, normed_gemv, residual_gemv
from worker.cuda.tiles import GemvTile, GemvTiles
from worker.models.weights import LayerWeights

Attend = Callable[[int, LayerWeights, torch.Tensor, DecodePlan], None]
"""Attention of a layer, by its number, over q/k/v float32 [columns] into the buffers' `attended`."""


class RowLayers:
    """Launches layers on torch's current stream; capturable."""

    def __init__(self, shape: DecodeShape, buffers: DecodeBuffers, attend: Attend) -> None:
        self._shape, self._buffers, self._attend = shape, buffers, attend

    def run(self, index: int, layer: LayerWeights, next_norm: torch.Tensor, num_sums: int, plan: DecodePlan) -> int:
        """`num_sums`: partial sums of squares that the layer before left; returns how many this one did."""
        tiles = plan.gemv
        assert tiles is not None
        run = self._packed if isinstance(layer.qkv, PackedMatrix) else self._plain
        return run(index, layer, next_norm, num_sums, plan, tiles)

    def _plain(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        num_sums: int,
        plan: DecodePlan,
        tiles: GemvTiles,
    ) -> int:
        s, b = self._shape, self._buffers

        def residual(x: torch.Tensor, w: torch.Tensor, norm: torch.Tensor, k: int, tile: GemvTile) -> int:
            programs = s.hidden // tile.columns
            residual_gemv_kernel[(programs,)](
                x, w, b.residual, norm, b.normed, b.sums, K=k, COLUMNS=tile.columns, DEPTH=tile.depth,
                EARLY=tile.early, **plan.launch(tile.warps),
            )  # fmt: skip
            return programs

        tile = tiles.qkv
        normed_gemv_kernel[(s.qkv_columns // tile.columns,)](
            b.normed, b.sums, layer.qkv, b.partials, num_sums, s.norm_eps, K=s.hidden, COLUMNS=tile.columns,
            DEPTH=tile.depth, MAX_SUMS=b.max_sums, EARLY=tile.early, **plan.launch(tile.warps),
        )  # fmt: skip
        self._attend(index, layer, b.partials, plan)
        num_sums = residual(b.attended, layer.output, layer.mlp_norm, s.query_columns, tiles.o)
        tile = tiles.gate_up
        normed_gate_up_gemv_kernel[(s.ffn // tile.columns,)](
            b.normed, b.sums, layer.gate_up, b.active, num_sums, s.norm_eps, N=s.ffn, K=s.hidden, COLUMNS=tile.columns,
            DEPTH=tile.depth, MAX_SUMS=b.max_sums, EARLY=tile.early, **plan.launch(tile.warps),
        )  # fmt: skip
        return residual(b.active, layer.down, next_norm, s.ffn, tiles.down)

    def _packed(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        num_sums: int,
        plan: DecodePlan,
        tiles: GemvTiles,
    ) -> int:
        s, b = self._shape, self._buffers
        qkv, output, gate_up, down = packed_matrices(layer)

        def residual(x: torch.Tensor, matrix: PackedMatrix, norm: torch.Tensor, tile: GemvTile) -> int:
            return residual_gemv(x, matrix, b.residual, norm, b.normed, b.sums, tile, plan.launch(tile.warps))

        normed_gemv(b.normed, b.sums, num_sums, s.norm_eps, qkv, b.partials, tiles.qkv, plan.launch(tiles.qkv.warps))
        self._attend(index, layer, b.partials, plan)
        num_sums = residual(b.attended, output, layer.mlp_norm, tiles.o)
        launch = plan.launch(tiles.gate_up.warps)
        gate_up_gemv(b.normed, b.sums, num_sums, s.norm_eps, gate_up, b.active, tiles.gate_up, launch)
        return residual(b.active, down, next_norm, tiles.down)

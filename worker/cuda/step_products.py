"""A decode step's products of several rows with a layer's matrices, whatever these are made of. Capturable.

Rows x that a plain or a packed matrix takes are the model's numbers. One of fp8 takes their codes, which whoever wrote
the rows left in the buffers, or `coded` makes of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from worker.cuda.cublas_lt import ProductShape
from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_plan import Chain, DecodePlan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.fp8 import Fp8Matrix
from worker.cuda.fp8_products import code_rows, scaled_product
from worker.cuda.linear import gate_up_kernel, split_linear_kernel
from worker.cuda.packed import PackedMatrix, values_of
from worker.cuda.packed_products import gate_up_product, split_product
from worker.cuda.tiles import LinearTile
from worker.cuda.vendor_products import VendorProducts
from worker.models.weights import LayerWeights


class StepProducts:
    """For one model over one set of buffers."""

    def __init__(self, shape: DecodeShape, buffers: DecodeBuffers, vendor: VendorProducts | None = None) -> None:
        """Without `vendor` the library's products are torch's, which run what its heuristic names first."""
        self.takes_codes = shape.quantization == "fp8"
        self._buffers = buffers
        self._vendor, self._tries = vendor, shape.plain_halves

    def choose(self, width: int, plan: DecodePlan, layers: Sequence[LayerWeights]) -> int:
        """Tries the library's kernels for what a step of this plan leaves to it, over the layers' matrices. Returns how
        many products were tried: those that never were before."""
        if self._vendor is None or not self._tries or plan.chain is not Chain.LIBRARY:
            return 0
        tried = 0
        for name in ("qkv", "output", "gate_up", "down"):
            matrices: list[Tensor] = [getattr(layer, name) for layer in layers]
            shape = self._shape(width, matrices[0], plan.down_parts if name == "down" else 1)
            tried += self._vendor.choose(shape, matrices)
        return tried

    def coded(self, x: Tensor, width: int, plan: DecodePlan, tile: LinearTile | None = None) -> None:
        """Makes the codes of rows [0, width) of x [rows, K], if products take such; `tile`: of the one that comes."""
        if self.takes_codes:
            codes, early = self._buffers.codes, tile is not None and tile.ahead > 0
            code_rows(x[:width], codes.of(x.shape[1]), codes.scales, dependent=plan.dependent_launch, early=early)

    def split(self, x: Tensor, w: Tensor, width: int, plan: DecodePlan, tile: LinearTile) -> None:
        """Partial sums of x times w [N, K] transposed, fp32 [splits, rows, N], into the buffers' `partials`."""
        launch, out, (n, k) = plan.launch(tile.warps, tile.stages), self._buffers.partials, w.shape
        stride = self._buffers.padded_rows * n
        if isinstance(w, PackedMatrix):
            split_product(x, w, out, width, stride, tile, launch)
            return
        assert tile.divides(n, k)
        split_linear_kernel[(n // tile.columns, tile.splits, math.ceil(width / tile.rows))](
            *self._operands(x, w), out, width, stride, N=n, K=k, SPLITS=tile.splits, **_constants(tile, k), **launch,
            SCALED=self.takes_codes,
        )  # fmt: skip

    def gate_up(self, x: Tensor, w: Tensor, width: int, plan: DecodePlan, tile: LinearTile) -> None:
        """silu(gate) * up of x, w [2 N, K], into the buffers' `active`."""
        launch, out, (n, k) = plan.launch(tile.warps, tile.stages), self._buffers.active, w.shape
        if isinstance(w, PackedMatrix):
            gate_up_product(x, w, out, width, tile, launch)
            return
        assert tile.divides(n // 2, k)
        gate_up_kernel[(n // 2 // tile.columns, math.ceil(width / tile.rows))](
            *self._operands(x, w), out, width, N=n // 2, K=k, **_constants(tile, k), **launch, SCALED=self.takes_codes,
        )  # fmt: skip

    def whole(self, x: Tensor, w: Tensor, out: Tensor, width: int) -> None:
        """out [rows, N] = x times w [N, K] transposed, by the vendor's library."""
        if isinstance(w, Fp8Matrix):
            codes = self._buffers.codes
            scaled_product(codes.of(w.shape[1])[:width], codes.scales[:width], w, out[:width])
        elif self._vendor is not None and self._vendor.takes(shape := self._shape(width, w)):
            self._vendor.run(shape, x, w, out)
        else:
            torch.mm(x[:width], values_of(w).t(), out=out[:width])

    def parts(self, x: Tensor, w: Tensor, width: int, parts: int) -> None:
        """The sums of x times w [N, K] transposed over each of so many parts of K, fp32 [parts, rows, N], into the
        buffers' `partials`, by the vendor's library."""
        shape = self._shape(width, w, parts)
        if self._vendor is not None and self._vendor.takes(shape):
            self._vendor.run(shape, x, w, self._buffers.partials)
            return
        for part, (rows, columns) in enumerate(zip(x[:width].chunk(parts, 1), w.chunk(parts, 1), strict=True)):
            out = self._buffers.partials[part * shape.part_stride :][: width * len(w)].view(width, len(w))
            if x.is_cuda:
                torch.mm(rows, columns.t(), out_dtype=torch.float32, out=out)
            else:
                torch.mm(rows.float(), columns.float().t(), out=out)

    def _shape(self, width: int, w: Tensor, parts: int = 1) -> ProductShape:
        columns, depth = w.shape
        part_stride = self._buffers.padded_rows * columns if parts > 1 else 0
        return ProductShape(width, columns, depth, w.dtype, parts, part_stride)

    def _operands(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Both sides of a product, and their scales; a plain one never reads these."""
        codes = self._buffers.codes
        if isinstance(w, Fp8Matrix):
            return codes.of(w.shape[1]), w.codes, codes.scales, w.scales
        return x, w, codes.scales, codes.scales


def _constants(tile: LinearTile, depth: int) -> dict[str, Any]:
    return {
        "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "SWAP": tile.swap, "EARLY": tile.early,
        "AHEAD": tile.ahead_of(depth),
    }  # fmt: skip

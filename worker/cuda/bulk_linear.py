"""Matrix products of 65 to 128 rows with the large matrices of an unquantized model, on Hopper's tensor cores.

As `worker.cuda.linear`, but both sides come in whole tiles by the copy engine of each multiprocessor (the tensor memory
accelerator, through descriptors): at so many rows a product is bound by arithmetic about as much as by its bytes, and
no thread has time to compute addresses. With more rows the vendor's library is faster. Programs of the same weights lie
next to each other in the grid, so that a second tile of rows finds them in the second-level cache.

Shapes must divide (N by COLUMNS, K by SPLITS * DEPTH). Rows of x beyond its buffer count as zeros.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from worker.cuda.tiles import LinearTile


@triton.jit(do_not_specialize=["num_rows", "split_stride"])
def bulk_split_kernel(
    x, w, out, num_rows, split_stride,
    N: tl.constexpr, K: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out fp32 [SPLITS, rows, N], `split_stride` elements from one split to the next: partial sums of x @ w.T. x
    [padded rows, K] in tiles of [ROWS, DEPTH], w [N, K] in tiles of [COLUMNS, DEPTH]."""
    if PDL and EARLY:
        gdc_launch_dependents()
    row, column, split = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS, tl.program_id(2)
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    start = split * (K // SPLITS)
    if PDL:
        gdc_wait()
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K // SPLITS, DEPTH):
        x_tile = x.load([row, start + k])
        w_tile = w.load([column, start + k])
        acc = tl.dot(x_tile, w_tile.T, acc, input_precision="ieee")
    if PDL and not EARLY:
        gdc_launch_dependents()
    at = out + split * split_stride.to(tl.int64)
    tl.store(at + rows[:, None] * N + columns[None, :], acc, mask=(rows < num_rows)[:, None])


@triton.jit(do_not_specialize=["num_rows"])
def bulk_gate_up_kernel(
    x, w, out, num_rows,
    N: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, N] = silu(x @ gate.T) * (x @ up.T); w is [2 N, K], the gate's rows first. Tiles as those of
    `bulk_split_kernel`."""
    if PDL and EARLY:
        gdc_launch_dependents()
    row, column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    if PDL:
        gdc_wait()
    gate = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, K, DEPTH):
        x_tile = x.load([row, k])
        gate_tile = w.load([column, k])
        up_tile = w.load([column + N, k])
        gate = tl.dot(x_tile, gate_tile.T, gate, input_precision="ieee")
        up = tl.dot(x_tile, up_tile.T, up, input_precision="ieee")
    if PDL and not EARLY:
        gdc_launch_dependents()
    active = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * N + columns[None, :], active, mask=(rows < num_rows)[:, None])


def in_tiles(x: Tensor, w: Tensor, tile: LinearTile) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of both sides; captured launches keep what they say of addresses."""
    rows = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
    columns = TensorDescriptor.from_tensor(w, [tile.columns, tile.depth])
    return rows, columns

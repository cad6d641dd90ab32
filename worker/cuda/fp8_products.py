"""Products of rows with matrices of fp8, launched one operation after the other: prefills, programs, wide steps.

Few rows go through the kernel of decode steps, which cuts K so that every multiprocessor has work; more through the
vendor's product. What is launched depends on sizes alone, and nothing is waited for.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from worker.cuda.fp8 import E4M3, Fp8Matrix, exact_product
from worker.cuda.fp8_rows import fp8_rows_kernel
from worker.cuda.fp8_tiles import fitted
from worker.cuda.launch import launch_options
from worker.cuda.linear import split_linear_kernel

MOST_ROWS = 64


def code_rows(x: Tensor, codes: Tensor, scales: Tensor, *, dependent: bool = False, early: bool = False) -> None:
    """Rows of x [T, K], which may lie apart, to codes e4m3 [T or more, K] and scales float32 [T or more]. `dependent`:
    as `launch_options` takes it. `early`: the next such kernel may start when this one starts."""
    num_rows, depth = x.shape
    block = triton.next_power_of_2(depth)
    warps = max(1, min(16, block // 512))
    fp8_rows_kernel[(num_rows,)](
        x, x.stride(0), codes, scales, K=depth, BLOCK=block, NATIVE=x.is_cuda, EARLY=early,
        **launch_options(warps, dependent=dependent),
    )  # fmt: skip


def scaled_product(codes: Tensor, scales: Tensor, matrix: Fp8Matrix, out: Tensor) -> None:
    """out [T, N], bfloat16 on a GPU: rows of codes [T, K] with `scales` [T] times the matrix, by the library."""
    if not codes.is_cuda:
        out.copy_(exact_product(codes, scales, matrix))
        return
    torch._scaled_mm(
        codes, matrix.codes.t(), scale_a=scales[:, None], scale_b=matrix.scales[None, :], out_dtype=out.dtype,
        use_fast_accum=True, out=out,
    )  # fmt: skip


def product_of_rows(x: Tensor, matrix: Fp8Matrix) -> Tensor:
    """x [T, K] times the matrix [N, K] transposed: [T, N], of x's dtype."""
    num_rows, (num_columns, depth) = len(x), matrix.shape
    if num_rows == 0:
        return x.new_empty(0, num_columns)
    tile = fitted("down", num_rows, num_columns, depth) if num_rows <= MOST_ROWS else None
    room = num_rows if tile is None else -(-num_rows // tile.rows) * tile.rows  # a tile reads all of its rows
    codes = torch.empty(room, depth, dtype=E4M3, device=x.device)
    scales = torch.empty(room, dtype=torch.float32, device=x.device)
    code_rows(x, codes, scales)
    if tile is None:
        dtype = torch.bfloat16 if x.is_cuda else x.dtype  # the vendor's gives no other
        product = torch.empty(num_rows, num_columns, dtype=dtype, device=x.device)
        scaled_product(codes, scales, matrix, product)
        return product.to(x.dtype)
    parts = torch.empty((tile.splits, num_rows, num_columns), dtype=torch.float32, device=x.device)
    split_linear_kernel[(num_columns // tile.columns, tile.splits, triton.cdiv(num_rows, tile.rows))](
        codes, matrix.codes, scales, matrix.scales, parts, num_rows, num_rows * num_columns, N=num_columns, K=depth,
        SPLITS=tile.splits, ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, SWAP=tile.swap, SCALED=True,
        EARLY=False, AHEAD=0, **launch_options(tile.warps, tile.stages),
    )  # fmt: skip
    return (parts[0] if tile.splits == 1 else parts.sum(dim=0)).to(x.dtype)

"""Launches the kernels of packed matrices: `worker.cuda.packed_gemv` and `packed_linear`. Capturable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from worker.cuda.packed import PackedMatrix
from worker.cuda.packed_gemv import packed_gate_up_gemv_kernel, packed_normed_gemv_kernel, packed_residual_gemv_kernel
from worker.cuda.packed_head import packed_head_gemv_kernel, packed_head_kernel
from worker.cuda.packed_linear import packed_gate_up_kernel, packed_split_kernel, values_kernel
from worker.cuda.tiles import GemvTile, LinearTile

Launch = Mapping[str, Any]
"""Warps, stages, and whether a kernel is launched as a programmatic dependent."""

_VALUES_WORDS = 512


def normed_gemv(
    x: Tensor,
    sums: Tensor,
    num_sums: int,
    eps: float,
    matrix: PackedMatrix,
    out: Tensor,
    tile: GemvTile,
    launch: Launch,
) -> None:
    """out [N] fp32 = norm(x) times the matrix; `sums` are the parts of x's squares, of which there are `num_sums`."""
    assert len(matrix) % tile.columns == 0
    packed_normed_gemv_kernel[(len(matrix) // tile.columns,)](
        x, sums, matrix.codes, matrix.scales, out, num_sums, eps, K=matrix.shape[1], COLUMNS=tile.columns,
        DEPTH=tile.depth, BITS=matrix.bits, MAX_SUMS=len(sums), NATIVE=x.is_cuda, EARLY=tile.early, **launch,
    )  # fmt: skip


def gate_up_gemv(
    x: Tensor,
    sums: Tensor,
    num_sums: int,
    eps: float,
    matrix: PackedMatrix,
    out: Tensor,
    tile: GemvTile,
    launch: Launch,
) -> None:
    """out [N / 2] = silu(gate) * up of norm(x)."""
    num_columns = len(matrix) // 2
    assert num_columns % tile.columns == 0
    packed_gate_up_gemv_kernel[(num_columns // tile.columns,)](
        x, sums, matrix.codes, matrix.scales, out, num_sums, eps, N=num_columns, K=matrix.shape[1],
        COLUMNS=tile.columns, DEPTH=tile.depth, BITS=matrix.bits, MAX_SUMS=len(sums), NATIVE=x.is_cuda,
        EARLY=tile.early, **launch,
    )  # fmt: skip


def residual_gemv(
    x: Tensor,
    matrix: PackedMatrix,
    residual: Tensor,
    norm: Tensor,
    scaled: Tensor,
    sums: Tensor,
    tile: GemvTile,
    launch: Launch,
) -> int:
    """residual += x times the matrix; scaled = residual * norm. Returns how many parts of its squares are in `sums`."""
    programs = len(matrix) // tile.columns
    assert len(matrix) % tile.columns == 0
    packed_residual_gemv_kernel[(programs,)](
        x, matrix.codes, matrix.scales, residual, norm, scaled, sums, K=matrix.shape[1], COLUMNS=tile.columns,
        DEPTH=tile.depth, BITS=matrix.bits, NATIVE=x.is_cuda, EARLY=tile.early, **launch,
    )  # fmt: skip
    return programs


def split_product(
    x: Tensor, matrix: PackedMatrix, out: Tensor, num_rows: int, split_stride: int, tile: LinearTile, launch: Launch
) -> None:
    """out fp32 [splits, rows, N]: partial sums of x times the matrix. x is padded to whole tiles of rows."""
    num_columns, depth = matrix.shape
    packed_split_kernel[(num_columns // tile.columns, tile.splits, triton.cdiv(num_rows, tile.rows))](
        x, matrix.codes, matrix.scales, out, num_rows, split_stride, N=num_columns, K=depth, SPLITS=tile.splits,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, BITS=matrix.bits, NATIVE=x.is_cuda, EARLY=tile.early,
        AHEAD=tile.ahead_of(depth, matrix.bits), **launch,
    )  # fmt: skip


def gate_up_product(
    x: Tensor, matrix: PackedMatrix, out: Tensor, num_rows: int, tile: LinearTile, launch: Launch
) -> None:
    """out [rows, N / 2] = silu(gate) * up of x."""
    num_columns, depth = len(matrix) // 2, matrix.shape[1]
    packed_gate_up_kernel[(num_columns // tile.columns, triton.cdiv(num_rows, tile.rows))](
        x, matrix.codes, matrix.scales, out, num_rows, N=num_columns, K=depth, ROWS=tile.rows, COLUMNS=tile.columns,
        DEPTH=tile.depth, BITS=matrix.bits, NATIVE=x.is_cuda, EARLY=tile.early,
        AHEAD=tile.ahead_of(depth, matrix.bits), **launch,
    )  # fmt: skip


def head_gemv(
    x: Tensor,
    sums: Tensor,
    num_sums: int,
    eps: float,
    head: PackedMatrix,
    logits: Tensor,
    best: Tensor,
    best_id: Tensor,
    tile: GemvTile,
    launch: Launch,
    *,
    store_logits: bool,
) -> None:
    """Each program's largest of norm(x) times an eight-bit head into `best` and `best_id`, and where asked for all of
    them into `logits`."""
    num_tokens, depth = head.shape
    packed_head_gemv_kernel[(triton.cdiv(num_tokens, tile.columns),)](
        x, sums, head.codes, head.scales, logits, best, best_id, num_sums, eps, N=num_tokens, K=depth,
        COLUMNS=tile.columns, DEPTH=tile.depth, MAX_SUMS=len(sums), STORE_LOGITS=store_logits, NATIVE=x.is_cuda,
        **launch,
    )  # fmt: skip


def head_product(
    x: Tensor,
    head: PackedMatrix,
    logits: Tensor,
    best: Tensor,
    best_id: Tensor,
    num_rows: int,
    tile: LinearTile,
    launch: Launch,
    *,
    store_logits: bool,
) -> None:
    """The same of several rows, which are padded to whole tiles; `best` and `best_id` [rows, programs]."""
    num_tokens, depth = head.shape
    programs = triton.cdiv(num_tokens, tile.columns)
    packed_head_kernel[(triton.cdiv(num_rows, tile.rows), programs)](
        x, head.codes, head.scales, logits, best, best_id, num_rows, programs, N=num_tokens, K=depth, ROWS=tile.rows,
        COLUMNS=tile.columns, DEPTH=tile.depth, STORE_LOGITS=store_logits, NATIVE=x.is_cuda, **launch,
    )  # fmt: skip


def unpacked(matrix: PackedMatrix) -> Tensor:
    """[N, K], a plain tensor of its values."""
    num_rows, depth = matrix.shape
    out = torch.empty(num_rows, depth, dtype=matrix.dtype, device=matrix.codes.device)
    values_kernel[(num_rows, triton.cdiv(matrix.codes.shape[1], _VALUES_WORDS))](
        matrix.codes, matrix.scales, out, K=depth, WORDS=_VALUES_WORDS, BITS=matrix.bits, NATIVE=out.is_cuda,
        num_warps=4,
    )  # fmt: skip
    return out

"""How a cell's K or V of one layer lies in memory: as numbers of a dtype, or as 8-bit ones with a scale a head.

A scaled row holds one e4m3 byte for each dimension of each head, then a float32 for each head; a number is its byte's
value times its head's scale, which puts the head's largest one at 448, the largest of e4m3. So a head that is small
beside its neighbours loses nothing to them, and whoever moves rows as bytes moves the scales along. Here is also the
plain torch of it, which the kernels are compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALED = torch.float8_e4m3fn
LARGEST = 448.0
_SCALE_BYTES = 4
# Every row, and so every head of a usual size, starts where wide loads may.
_ALIGNED = 16


def cell_dtype(name: str | None, model_dtype: torch.dtype) -> torch.dtype:
    """Of cells that settings name so, for a model of `model_dtype`; None: the same."""
    named = {"fp8": SCALED, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return model_dtype if name is None else named[name]


def row_shape(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Of a row in its pool's storage: heads by dimensions, or 1 by bytes where it is scaled."""
    if dtype != SCALED:
        return num_kv_heads, head_dim
    return 1, -(-(scales_at(num_kv_heads, head_dim) + num_kv_heads) * _SCALE_BYTES // _ALIGNED) * _ALIGNED


def scales_at(num_kv_heads: int, head_dim: int) -> int:
    """Where a scaled row's scales begin, in float32 words."""
    return -(-num_kv_heads * head_dim // _SCALE_BYTES)


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == SCALED else dtype


def packed_rows(heads: Tensor) -> Tensor:
    """Scaled rows uint8[T, row bytes] of `heads` [T, J, D]. A head that is not finite is none in its row either."""
    num_tokens, num_kv_heads, head_dim = heads.shape
    x = heads.float()
    largest = x.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(largest == 0, 1.0, largest / LARGEST) + (x * 0.0).sum(dim=-1, keepdim=True)
    rows = torch.zeros(num_tokens, row_shape(num_kv_heads, head_dim, SCALED)[1], dtype=torch.uint8, device=x.device)
    rows[:, : num_kv_heads * head_dim] = (x / scale).to(SCALED).view(torch.uint8).flatten(1)
    first = scales_at(num_kv_heads, head_dim)
    rows.view(torch.float32)[:, first : first + num_kv_heads] = scale.squeeze(-1)
    return rows


def unpacked_rows(rows: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """float32[T, J, D] of scaled rows."""
    first = scales_at(num_kv_heads, head_dim)
    scale = rows.view(torch.float32)[:, first : first + num_kv_heads, None]
    heads = rows[:, : num_kv_heads * head_dim].contiguous().view(SCALED).float()
    return heads.view(-1, num_kv_heads, head_dim) * scale

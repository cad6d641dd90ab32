"""What launches of kernels have in common: their options, and how large a grid may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

GRID_LIMIT: Final = 65_535
"""Programs along a grid's second axis, or its third, on any GPU."""


def aligned(length: int, unit: int) -> int:
    """`length` rounded up to whole units, so that what follows begins where a kernel expects it: for a pointer that is
    a multiple of 16 bytes and for one that is none a kernel is compiled anew."""
    return -(-length // unit) * unit


def launch_options(warps: int, stages: int | None = None, *, dependent: bool = False) -> dict[str, Any]:
    """Of a kernel that has the flag PDL. `dependent`: it may start before the one ahead of it has ended, and waits for
    that itself (programmatic dependent launch). Without `stages` the compiler chooses."""
    options: dict[str, Any] = {"PDL": dependent, "num_warps": warps}
    if stages is not None:
        options["num_stages"] = stages
    return options | {"launch_pdl": True} if dependent else options


def of_grids(rows: Tensor, most: int = GRID_LIMIT) -> Sequence[Tensor]:
    """`rows` in as many parts as launches need that take `most` of them each; mostly one, which costs nothing."""
    return (rows,) if len(rows) <= most else torch.split(rows, most)

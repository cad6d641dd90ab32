"""How fast this machine can be at best: bytes moved and matrix products a second, and the floors they set.

Measured in the run that they are compared with, since a shared machine drifts. Not for predicting a program's speed:
a floor says only what cannot be beaten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK_BYTES = 256 * 2**20  # several times any processor's last cache, and any GPU's
REPEATS = 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second over memory much larger than any cache."""

    copy: float  # read plus written
    read: float

    @property
    def best(self) -> float:
        return max(self.copy, self.read)


def measure_bandwidth(device: str, block_bytes: int = BLOCK_BYTES) -> Bandwidth:
    """Copy one large block onto another, and sum one; the best of some repeats of each. Holds two blocks meanwhile."""
    source = torch.ones(block_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    copy_s = min(_timed(lambda: target.copy_(source), device) for _ in range(REPEATS))
    read_s = min(_timed(lambda: source.sum(), device) for _ in range(REPEATS))
    return Bandwidth(copy=2 * block_bytes / copy_s, read=block_bytes / read_s)


def measure_matmul_rate(
    rows: int,
    device: str,
    dtype: torch.dtype = torch.float32,
    *,
    width: int = 1536,
    total_bytes: int = BLOCK_BYTES,
) -> float:
    """Operations a second of `[rows, width] @ [width, width]`, two for each weight and row, over weights that no
    cache holds: what a chain of a model's linears can reach at this many rows. The best of some repeats, as a floor
    wants it. Holds `total_bytes` of weights."""
    bytes_each = width * width * dtype.itemsize
    weights = [torch.randn(width, width, device=device, dtype=dtype) for _ in range(max(1, total_bytes // bytes_each))]
    x = torch.randn(rows, width, device=device, dtype=dtype)

    def chain() -> object:
        for weight in weights:
            out = torch.nn.functional.linear(x, weight)
        return out

    chain()
    seconds = min(_timed(chain, device) for _ in range(REPEATS))
    return 2 * rows * width * width * len(weights) / seconds


def decode_floor_s(*, batch: int, context: int, weight_bytes: int, bytes_per_cell: int, bandwidth: float) -> float:
    """Least seconds for one decode step: every weight is read once, and every sequence's K and V once."""
    return (weight_bytes + batch * context * bytes_per_cell) / bandwidth


def _timed(work: Callable[[], object], device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)

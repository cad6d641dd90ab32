"""A forward's attention plan in the one form that travels through a program's methods: plain tensors of integers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """`table` [at least 2], on the pool's device, holds the plan's arrays end to end; `layout` int64 [at least 2], on
    the CPU, their sizes. Which arrays there are is the business of the device's kernel."""

    table: Tensor
    layout: Tensor

"""How a decode step's products are cut into programs. Which tiles a product gets is `decode_plan`'s choice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GemvTile:
    """`columns` a program, `depth` of K at a time. `early`: lets the next kernel start when this one starts."""

    columns: int
    depth: int
    warps: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class LinearTile:
    """`rows` x `columns` a program, K in `splits`, `depth` of K at a time, `stages` of it in flight. `swap`: weights
    are the tensor cores' 64-row operand. `ahead`: of each column's K that many are asked into the second-level cache
    while the kernel waits for its rows, which norms and codes in front of it let it start early for; 0 for none."""

    rows: int
    columns: int
    depth: int
    splits: int
    stages: int
    warps: int
    swap: bool
    early: bool = False
    ahead: int = 0

    def __post_init__(self) -> None:
        assert self.ahead == 0 or (self.ahead >= 128 and self.ahead.bit_count() == 1), "whole lines, and a power of two"

    def divides(self, num_columns: int, depth: int) -> bool:
        """Whether whole tiles cover a matrix [num_columns, depth]; kernels ask for nothing less, and do not look."""
        return num_columns % self.columns == 0 and depth % (self.splits * self.depth) == 0

    def ahead_of(self, depth: int, bits: int = 8) -> int:
        """`ahead` for a matrix of this depth and numbers of so many bits: no more than a program reads of it, and
        nothing where that is less than a line of 128 bytes."""
        part = depth // self.splits
        ahead = 0 if part == 0 else min(self.ahead, 1 << (part.bit_length() - 1))
        return ahead if ahead >= max(128, 128 * 8 // bits) else 0


@dataclass(frozen=True, slots=True)
class GemvTiles:
    qkv: GemvTile
    o: GemvTile
    gate_up: GemvTile
    down: GemvTile
    head: GemvTile


@dataclass(frozen=True, slots=True)
class LinearTiles:
    qkv: LinearTile
    o: LinearTile
    gate_up: LinearTile
    down: LinearTile
    head: LinearTile

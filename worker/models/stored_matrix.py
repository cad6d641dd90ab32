"""A matrix of a decoder that is stored otherwise than as its values, in the place of a tensor of them.

`torch.nn.functional.linear` takes it as its weight, so that a decoder is written once. Any other operation is refused:
what needs the values as a tensor must be told so, and not get a copy of several times the size. Each kind says how it
multiplies; what its kernels read is its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from worker.config import Quantization

NUMBERS_AT_ONCE: Final = 1 << 25
"""Of a matrix that is being quantized: what it is made through has several times their size."""


class StoredMatrix(Tensor):
    """[N, K], for reading alone. Without gradients."""

    @property
    def quantization(self) -> Quantization:
        """What it was made by; a file's own numbers by none."""
        return "none"

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., K] times the matrix transposed, [..., N] of x's dtype, and `bias` [N]."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if (operation := cls._operations().get(func)) is not None:
            return operation(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        names = " and ".join(each.__name__ for each in cls._operations())
        raise TypeError(f"a {cls.__name__} has {names} alone, not {func}")

    @classmethod
    def _operations(cls) -> Mapping[Callable[..., Any], Callable[..., Tensor]]:
        """The functions of torch that take it as their weight, and what is called instead."""
        return {functional.linear: _linear}


def _linear(input: Tensor, weight: StoredMatrix, bias: Tensor | None = None) -> Tensor:
    return weight.linear(input, bias)


def by_rows(
    matrix: Tensor, some: Callable[[Tensor], tuple[Tensor, Tensor]], numbers_at_once: int
) -> tuple[Tensor, Tensor]:
    """What `some` makes of rows, codes and scales, of all rows of a plain matrix, taken so few at a time that they are
    at most so many numbers, or one row."""
    at_once = max(1, numbers_at_once // matrix.shape[1])
    parts = [some(rows) for rows in torch.split(matrix, at_once)]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])

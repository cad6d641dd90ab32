"""Matrices of e4m3 with a scale a row, and rows of the same kind that they are multiplied with: what they stand for.

Both sides of a product are rounded (W8A8): a matrix once, when it is loaded, and the rows of x in each product. A row's
scale is its largest magnitude over 448, the largest of e4m3, and its codes are its numbers over the scale. Sums are
float32, and are multiplied by both scales in the end. This is the arithmetic of torchao's dynamic fp8 by rows.

Here is the plain torch of it. Kernels are in `linear` and `fp8_rows`, their launches in `fp8_products`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from planner.errors import InvalidConfiguration
from worker.config import Quantization
from worker.models.stored_matrix import NUMBERS_AT_ONCE, StoredMatrix, by_rows
from worker.models.weights import DecoderWeights

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
LEAST = 1e-12
"""Rows whose largest magnitude is less have the scale of this; their codes are small or nothing."""

# Rows and columns of a matrix that the vendor's product takes at a time.
_TILE = 16
# The first GPUs with products of fp8.
_CAPABILITY = (8, 9)
_MATRICES = ("qkv", "output", "gate_up", "down")


class Fp8Matrix(StoredMatrix):
    """[N, K] of the model's dtype. `codes` e4m3 [N, K], `scales` float32 [N]."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Fp8Matrix:
        matrix: Fp8Matrix = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        matrix.codes, matrix.scales = codes, scales
        return matrix

    def __init__(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """Keeps `codes` and `scales`, which are not copied."""

    @property
    def quantization(self) -> Quantization:
        return "fp8"

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from worker.packed_op import fp8_linear  # which needs this module

        product = fp8_linear(x, self)
        return product if bias is None else product + bias

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["codes", "scales"], self.dtype

    @staticmethod
    def __tensor_unflatten__(parts: Mapping[str, Tensor], context: torch.dtype, shape: Any, stride: Any) -> Fp8Matrix:
        return Fp8Matrix(parts["codes"], parts["scales"], context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Fp8Matrix({self.shape[0]} x {self.shape[1]})"


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] to codes e4m3 [T, K] and scales float32 [T]. What is not finite makes all of its row's products so."""
    exact = x.float()
    largest = exact.abs().amax(dim=1).clamp(min=LEAST)
    scales = largest / torch.full_like(largest, LARGEST)  # on a GPU a plain number would be multiplied by its inverse
    return (exact * (1.0 / scales)[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scales


def fp8_matrix(matrix: Tensor, numbers_at_once: int = NUMBERS_AT_ONCE) -> Fp8Matrix:
    """A plain [N, K], rounded."""

    def some(rows: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = fp8_rows(rows)
        return codes.view(torch.uint8), scales

    codes, scales = by_rows(matrix, some, numbers_at_once)
    return Fp8Matrix(codes.view(E4M3), scales, matrix.dtype)


def exact_product(codes: Tensor, scales: Tensor, matrix: Fp8Matrix) -> Tensor:
    """float32 [T, N]: rows of codes [T, K] with `scales` [T] times the matrix transposed."""
    return (codes.float() @ matrix.codes.float().t()) * scales[:, None] * matrix.scales


def fp8_weights(weights: DecoderWeights) -> DecoderWeights:
    """The same decoder with rounded layers."""
    layers = (replace(each, **{name: fp8_matrix(getattr(each, name)) for name in _MATRICES}) for each in weights.layers)
    return replace(weights, layers=tuple(layers))


def check_fp8_matrix(name: str, matrix: Tensor) -> None:
    """Raises `InvalidConfiguration` where a matrix, its device or its dtype has no such products."""
    rows, columns = matrix.shape
    if columns % _TILE or rows % _TILE:
        raise InvalidConfiguration(
            f"fp8 takes matrices of a multiple of {_TILE} columns and rows; {name} has {columns} and {rows}",
            param="quantization",
        )
    if matrix.device.type != "cuda" or torch.cuda.get_device_capability(matrix.device) < _CAPABILITY:
        raise InvalidConfiguration(
            "fp8 needs a GPU of compute capability 8.9 or more; int8 and int4 work on any device", param="quantization"
        )
    if matrix.dtype != torch.bfloat16:
        raise InvalidConfiguration(f"fp8 computes in bfloat16, not {matrix.dtype}", param="dtype")

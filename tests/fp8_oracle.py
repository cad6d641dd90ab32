"""Matrices of fp8 that are multiplied with in plain torch, whatever the device: what kernels are judged by."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from worker.cuda.fp8 import Fp8Matrix, exact_product, fp8_rows
from worker.models.weights import DecoderWeights


class PlainFp8(Fp8Matrix):
    """The same matrix."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = exact_product(*fp8_rows(x), self).to(x.dtype)
        return product if bias is None else product + bias


def plain_fp8(weights: DecoderWeights) -> DecoderWeights:
    """The same decoder."""

    def plain(matrix: Tensor) -> Tensor:
        assert isinstance(matrix, Fp8Matrix)
        return PlainFp8(matrix.codes, matrix.scales, matrix.dtype)

    names = ("qkv", "output", "gate_up", "down")
    layers = tuple(replace(each, **{name: plain(getattr(each, name)) for name in names}) for each in weights.layers)
    return replace(weights, layers=layers)

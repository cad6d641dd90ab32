"""Matrices of fp8 that are multiplied with in plain torch, whatever the device: what kernels are judged by."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from worker.cuda.fp8 import Fp8Matrix, exact_product, fp8_rows
from worker.models.weights import DecoderWeights

_MATRICES = ("qkv", "output", "gate_up", "down")


class PlainFp8(Fp8Matrix):
    """The same matrix."""

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product = exact_product(*fp8_rows(x), self).to(x.dtype)
        return product if bias is None else product + bias


class AdaptedFp8(PlainFp8):
    """The same matrix, and what an adapter adds to it, [N, K], which takes x as it is."""

    added: Tensor

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return super().linear(x, bias) + x @ self.added.t()


def adapted_fp8(weights: DecoderWeights, added: DecoderWeights) -> DecoderWeights:
    """The same decoder with an adapter, of whose parts `added` is the sum of zero and its layers'."""

    def adapted(matrix: Tensor, part: Tensor) -> Tensor:
        assert isinstance(matrix, Fp8Matrix)
        both = AdaptedFp8(matrix.codes, matrix.scales, matrix.dtype)
        both.added = part
        return both

    layers = tuple(
        replace(each, **{name: adapted(getattr(each, name), getattr(part, name)) for name in _MATRICES})
        for each, part in zip(weights.layers, added.layers, strict=True)
    )
    return replace(weights, layers=layers)


def without_values(weights: DecoderWeights) -> DecoderWeights:
    """Matrices of zeros in the layers."""
    layers = (replace(e, **{name: torch.zeros_like(getattr(e, name)) for name in _MATRICES}) for e in weights.layers)
    return replace(weights, layers=tuple(layers))


def plain_fp8(weights: DecoderWeights) -> DecoderWeights:
    """The same decoder."""

    def plain(matrix: Tensor) -> Tensor:
        assert isinstance(matrix, Fp8Matrix)
        return PlainFp8(matrix.codes, matrix.scales, matrix.dtype)

    layers = (replace(each, **{name: plain(getattr(each, name)) for name in _MATRICES}) for each in weights.layers)
    return replace(weights, layers=tuple(layers))

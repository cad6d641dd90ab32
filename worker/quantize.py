"""Quantizes a decoder's layers through torchao: their matrices become tensors that multiply by its kernels.

On a GPU for fp8 alone: weights of eight and four bits are `worker.cuda.packed` there.

What is quantized is the layers' `qkv`, `output`, `gate_up` and `down`; all else keeps the model's dtype.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import InvalidConfiguration
from worker.config import Quantization
from worker.models.weights import DecoderWeights

# Kernels of weight-only products change with the number of rows: a small one for up to four, a tiled one above.
WEIGHT_ONLY_MIN_PREFILL = 5
# Columns of a matrix that share one scale of int4.
_GROUP_SIZE = 32
_MATRICES = ("qkv", "output", "gate_up", "down")
# Rows and columns of a matrix that products of fp8 take at a time.
_FP8_TILE = 16
# The first GPUs with products of fp8.
_FP8_CAPABILITY = (8, 9)


def least_prefill(quantization: Quantization) -> int:
    """The m that a program of such matrices must declare at least."""
    return WEIGHT_ONLY_MIN_PREFILL if quantization in ("int8", "int4") else 2


def quantize_weights(weights: DecoderWeights, quantization: Quantization) -> DecoderWeights:
    """The same decoder with quantized layers. Raises `InvalidConfiguration` where these matrices, or this device,
    have no such kernels."""
    if quantization == "none":
        return weights
    layers = []
    for layer in weights.layers:
        matrices = {name: _quantized(getattr(layer, name), quantization, name) for name in _MATRICES}
        layers.append(replace(layer, **matrices))
    return replace(weights, layers=tuple(layers))


def _quantized(matrix: Tensor, quantization: Quantization, name: str) -> Tensor:
    """torchao quantizes modules, so the matrix is put into one."""
    from torchao.quantization import quantize_

    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix, requires_grad=False)
    quantize_(linear, _recipe(matrix, quantization, name))
    return linear.weight.detach()


def _recipe(matrix: Tensor, quantization: Quantization, name: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    match quantization:
        case "int8":
            return Int8WeightOnlyConfig(set_inductor_config=False)
        case "int4":
            return _int4(matrix, name)
        case _:
            return _fp8(matrix, name)


def _fp8(matrix: Tensor, name: str) -> Any:
    """torchao leaves a matrix of another shape as it is, and says nothing."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow

    rows, columns = matrix.shape
    if columns % _FP8_TILE or rows % _FP8_TILE:
        raise InvalidConfiguration(
            f"fp8 takes matrices of a multiple of {_FP8_TILE} columns and rows; {name} has {columns} and {rows}",
            param="quantization",
        )
    if matrix.device.type != "cuda" or torch.cuda.get_device_capability(matrix.device) < _FP8_CAPABILITY:
        raise InvalidConfiguration(
            "fp8 needs a GPU of compute capability 8.9 or more; int8 and int4 work on any device",
            param="quantization",
        )
    if matrix.dtype != torch.bfloat16:
        raise InvalidConfiguration(f"fp8 computes in bfloat16, not {matrix.dtype}", param="dtype")
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow(), set_inductor_config=False)


def _int4(matrix: Tensor, name: str) -> Any:
    rows, columns = matrix.shape
    if columns % _GROUP_SIZE or rows % 16:
        raise InvalidConfiguration(
            f"int4 takes matrices of a multiple of {_GROUP_SIZE} columns and 16 rows; {name} has {columns} and {rows}",
            param="quantization",
        )
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=_GROUP_SIZE, set_inductor_config=False)

"""Quantizes a decoder's layers: their matrices become tensors that multiply by kernels of their own.

On a CPU these are torchao's, for weights of eight and four bits. On a GPU they are ours: `worker.cuda.packed` for such
weights and `worker.cuda.fp8` for products of fp8.

What is quantized is the layers' `qkv`, `output`, `gate_up` and `down`; all else keeps the model's dtype, but for the LM
head of a model that is packed on a GPU, which gets eight bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from planner.errors import InvalidConfiguration
from worker.config import Quantization
from worker.cuda.fp8 import check_fp8_matrix, fp8_matrix
from worker.cuda.packed import PACKED, pack
from worker.models.weights import Become, DecoderWeights

# Columns of a matrix that share one scale of int4.
_GROUP_SIZE = 32
_MATRICES = ("qkv", "output", "gate_up", "down")


def quantizer(quantization: Quantization) -> Become:
    """What matrices become one by one, as they are read. Raises `InvalidConfiguration` where a matrix, or its device,
    has no such kernels."""

    def become(name: str, matrix: Tensor) -> Tensor:
        is_packed = matrix.device.type == "cuda" and quantization in PACKED
        if quantization == "none" or not (is_packed or name in _MATRICES):
            return matrix
        if quantization == "fp8":
            check_fp8_matrix(name, matrix)
            return fp8_matrix(matrix)
        return pack(name, matrix, quantization) if is_packed else _quantized(matrix, quantization, name)

    return become


def quantize_weights(weights: DecoderWeights, quantization: Quantization) -> DecoderWeights:
    """The same decoder with quantized layers, beside its dense ones. Raises what `quantizer` does."""
    if quantization == "none":
        return weights
    become = quantizer(quantization)
    layers = (
        replace(layer, **{name: become(name, getattr(layer, name)) for name in _MATRICES}) for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers), head=become("head", weights.head))


def _quantized(matrix: Tensor, quantization: Quantization, name: str) -> Tensor:
    """torchao quantizes modules, so the matrix is put into one."""
    from torchao.quantization import quantize_

    linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(matrix, requires_grad=False)
    quantize_(linear, _recipe(matrix, quantization, name))
    return linear.weight.detach()


def _recipe(matrix: Tensor, quantization: Quantization, name: str) -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return Int8WeightOnlyConfig(set_inductor_config=False) if quantization == "int8" else _int4(matrix, name)


def _int4(matrix: Tensor, name: str) -> Any:
    rows, columns = matrix.shape
    if columns % _GROUP_SIZE or rows % 16:
        raise InvalidConfiguration(
            f"int4 takes matrices of a multiple of {_GROUP_SIZE} columns and 16 rows; {name} has {columns} and {rows}",
            param="quantization",
        )
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=_GROUP_SIZE, set_inductor_config=False)

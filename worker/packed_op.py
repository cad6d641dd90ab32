"""The operators by which layers multiply with quantized matrices: `torch.ops.raycomb.packed_linear` and `fp8_linear`.

Eager decoders and exported programs call the same ones; what is compiled sees plain tensors of codes and scales.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.cuda.fp8 import Fp8Matrix, exact_product, fp8_rows
from worker.cuda.packed import PackedMatrix

_LIBRARY = torch.library.Library("raycomb", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("packed_linear(Tensor x, Tensor codes, Tensor scales, int bits) -> Tensor")  # type: ignore[no-untyped-call]
_LIBRARY.define("fp8_linear(Tensor x, Tensor codes, Tensor scales) -> Tensor")  # type: ignore[no-untyped-call]


def packed_linear(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [T, K] times the matrix [N, K] transposed: [T, N], of x's dtype."""
    product: Tensor = torch.ops.raycomb.packed_linear(x, matrix.codes, matrix.scales, matrix.bits)
    return product


def fp8_linear(x: Tensor, matrix: Fp8Matrix) -> Tensor:
    """x [T, K], rounded a row at a time, times the matrix [N, K] transposed: [T, N], of x's dtype."""
    product: Tensor = torch.ops.raycomb.fp8_linear(x, matrix.codes, matrix.scales)
    return product


def _packed_on_cpu(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    return functional.linear(x, PackedMatrix(bits, codes, scales, x.dtype).values())


def _packed_on_cuda(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    from worker.cuda.packed_rows import product_of_rows  # needs Triton, which only a GPU's machine has

    return product_of_rows(x, PackedMatrix(bits, codes, scales, x.dtype))


def _fp8_on_cpu(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return exact_product(*fp8_rows(x), Fp8Matrix(codes, scales, x.dtype)).to(x.dtype)


def _fp8_on_cuda(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    from worker.cuda.fp8_products import product_of_rows  # needs Triton, which only a GPU's machine has

    return product_of_rows(x, Fp8Matrix(codes, scales, x.dtype))


def _fake(x: Tensor, codes: Tensor, scales: Tensor, bits: int = 8) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


for _name, _on_cpu, _on_cuda in (
    ("packed_linear", _packed_on_cpu, _packed_on_cuda),
    ("fp8_linear", _fp8_on_cpu, _fp8_on_cuda),
):
    _LIBRARY.impl(_name, _on_cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_name, _on_cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"raycomb::{_name}", _fake, lib=_LIBRARY)

"""The operator by which layers multiply with packed matrices: `torch.ops.raycomb.packed_linear`.

Eager decoders and exported programs call the same one; what is compiled sees plain tensors of words and scales.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.cuda.packed import PackedMatrix

_LIBRARY = torch.library.Library("raycomb", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("packed_linear(Tensor x, Tensor codes, Tensor scales, int bits) -> Tensor")  # type: ignore[no-untyped-call]


def packed_linear(x: Tensor, matrix: PackedMatrix) -> Tensor:
    """x [T, K] times the matrix [N, K] transposed: [T, N], of x's dtype."""
    product: Tensor = torch.ops.raycomb.packed_linear(x, matrix.codes, matrix.scales, matrix.bits)
    return product


def _on_cpu(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    return functional.linear(x, PackedMatrix(bits, codes, scales, x.dtype).values())


def _on_cuda(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    from worker.cuda.packed_rows import product_of_rows  # needs Triton, which only a GPU's machine has

    return product_of_rows(x, PackedMatrix(bits, codes, scales, x.dtype))


def _fake(x: Tensor, codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    return x.new_empty((x.shape[0], codes.shape[0]))


_LIBRARY.impl("packed_linear", _on_cpu, "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.impl("packed_linear", _on_cuda, "CUDA")  # type: ignore[no-untyped-call]
torch.library.register_fake("raycomb::packed_linear", _fake, lib=_LIBRARY)

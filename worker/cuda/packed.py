"""Matrices of four or eight bits, as the GPU's kernels for them read them, in the place of tensors of their values.

Weight-only: x keeps the model's dtype. Eight bits have a scale a row, value = scale * code. Of four bits 32 consecutive
columns share a scale and a base, value = base + scale * (16 + code): 16 and a code are a bfloat16 whose mantissa has
the code's bits in it, so one multiply-add makes the value (`packed_codes`).

Codes lie in words of 32 bits, and four words, which a thread of a one-row product loads at once, hold consecutive
columns: 16 of eight bits, or 32 of four. Half h (0 is the low one) of word t has the columns 8 i + 2 t + h, i = 0, 1
and so on, lowest bits first. So two bits' places that are half a word apart are neighbours, which make a pair of
bfloat16 at once, and what thread t of four has in its word is what the tensor cores' instruction wants of it: two
neighbours of each eight columns. (Marlin, Frantar et al. 2024, orders its weights for the same reason.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from planner.errors import InvalidConfiguration
from worker.config import Quantization
from worker.models.stored_matrix import NUMBERS_AT_ONCE, StoredMatrix, by_rows
from worker.models.weights import DecoderWeights, LayerWeights

PACKED: Final[tuple[Quantization, ...]] = ("int8", "int4")
"""What is packed on a GPU."""

GROUP = 32
CODE_OFFSET = 16
"""What is added to a code of four bits before it is multiplied by its scale."""

_LOAD_WORDS = 4
_MATRICES = ("qkv", "output", "gate_up", "down")


class PackedMatrix(StoredMatrix):
    """[N, K] of the model's dtype.

    `codes` int32 [N, K * bits / 32]. `scales` of 8 bits: float32 [N]; of 4 bits: int32 [N, K / 32], each of them two
    bfloat16, the scale in the low half and the base in the high one.
    """

    bits: int
    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, bits: int, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> PackedMatrix:
        shape = (codes.shape[0], codes.shape[1] * 32 // bits)
        matrix: PackedMatrix = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)
        matrix.bits, matrix.codes, matrix.scales = bits, codes, scales
        return matrix

    def __init__(self, bits: int, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> None:
        """Keeps `codes` and `scales`, which are not copied."""

    def values(self) -> Tensor:
        """[N, K], a plain tensor."""
        codes = _unpacked(self.codes, self.bits).float()
        if self.bits == 8:
            return (codes * self.scales[:, None]).to(self.dtype)
        words = self.scales.view(torch.bfloat16).view(*self.scales.shape, 2).float()
        values = words[:, :, 1:] + words[:, :, :1] * (codes.view(*self.scales.shape, GROUP) + CODE_OFFSET)
        return values.flatten(1).to(self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[int, torch.dtype]]:
        return ["codes", "scales"], (self.bits, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], context: tuple[int, torch.dtype], shape: Any, stride: Any
    ) -> PackedMatrix:
        bits, dtype = context
        return PackedMatrix(bits, parts["codes"], parts["scales"], dtype)

    @property
    def quantization(self) -> Quantization:
        return "int8" if self.bits == 8 else "int4"

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        from worker.packed_op import packed_linear  # which needs this module

        product = packed_linear(x, self)
        return product if bias is None else product + bias

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PackedMatrix({self.shape[0]} x {self.shape[1]}, {self.bits} bits)"


def values_of(matrix: Tensor) -> Tensor:
    """[N, K], a plain tensor: the matrix itself, or what a packed one stands for."""
    if not isinstance(matrix, PackedMatrix):
        return matrix
    if not matrix.codes.is_cuda:
        return matrix.values()
    from worker.cuda.packed_products import unpacked  # needs Triton, which only a GPU's machine has

    return unpacked(matrix)


def packed_matrices(layer: LayerWeights) -> tuple[PackedMatrix, PackedMatrix, PackedMatrix, PackedMatrix]:
    """q/k/v, output, gate and up, and down of a layer all of whose matrices are packed."""
    qkv, output, gate_up, down = layer.qkv, layer.output, layer.gate_up, layer.down
    assert isinstance(qkv, PackedMatrix)
    assert isinstance(output, PackedMatrix)
    assert isinstance(gate_up, PackedMatrix)
    assert isinstance(down, PackedMatrix)
    return qkv, output, gate_up, down


def pack_weights(weights: DecoderWeights, quantization: Quantization) -> DecoderWeights:
    """The same decoder with packed layers and head, beside its dense ones. Raises what `pack` does."""
    layers = (
        replace(layer, **{name: pack(name, getattr(layer, name), quantization) for name in _MATRICES})
        for layer in weights.layers
    )
    return replace(weights, layers=tuple(layers), head=pack("head", weights.head, quantization))


def pack(name: str, matrix: Tensor, quantization: Quantization) -> PackedMatrix:
    """A head has eight bits whatever the layers have. Raises `InvalidConfiguration` where the matrix cannot be packed
    so, by that name."""
    multiple = GROUP if quantization == "int4" else 16
    if matrix.shape[1] % multiple:
        raise InvalidConfiguration(
            f"{quantization} takes matrices of a multiple of {multiple} columns; {name} has {matrix.shape[1]}",
            param="quantization",
        )
    return pack_int4(matrix) if quantization == "int4" and name != "head" else pack_int8(matrix)


def pack_int8(matrix: Tensor, numbers_at_once: int = NUMBERS_AT_ONCE) -> PackedMatrix:
    """Symmetric, a row at a time: its largest magnitude is 127."""

    def some(rows: Tensor) -> tuple[Tensor, Tensor]:
        exact = rows.float()
        scales = exact.abs().amax(dim=1).div_(127).clamp_(min=torch.finfo(torch.float32).tiny)
        codes = (exact / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        return _packed(codes.view(torch.uint8), 8), scales

    return PackedMatrix(8, *by_rows(matrix, some, numbers_at_once), matrix.dtype)


def pack_int4(matrix: Tensor, numbers_at_once: int = NUMBERS_AT_ONCE) -> PackedMatrix:
    """Asymmetric: the codes 0 and 15 are a group's least and largest value. Scale and base are rounded first, so that
    the codes make up for it."""

    def some(rows: Tensor) -> tuple[Tensor, Tensor]:
        groups = rows.float().view(len(rows), -1, GROUP)
        least = groups.amin(dim=2, keepdim=True)
        spread = groups.amax(dim=2, keepdim=True) - least
        scale = (spread / 15).clamp_(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
        base = (least - CODE_OFFSET * scale.float()).bfloat16()
        codes = ((groups - base.float()) / scale.float() - CODE_OFFSET).round_().clamp_(0, 15).to(torch.uint8)
        words = torch.cat((scale, base), dim=2).contiguous().view(torch.int32).squeeze(2)
        return _packed(codes.flatten(1), 4), words

    return PackedMatrix(4, *by_rows(matrix, some, numbers_at_once), matrix.dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [N, K], of `bits` bits, to words int32 [N, K * bits / 32]."""
    halves = codes.view(len(codes), -1, 16 // bits, _LOAD_WORDS, 2).permute(0, 1, 3, 4, 2)
    if bits == 4:
        halves = halves[..., ::2] | (halves[..., 1::2] << 4)
    return halves.contiguous().flatten(1).view(torch.int32)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The opposite: codes [N, K], int8 of 8 bits and uint8 of 4."""
    halves = words.view(torch.int8 if bits == 8 else torch.uint8)
    if bits == 4:
        halves = torch.stack((halves & 15, halves >> 4), dim=-1).flatten(1)
    return halves.view(len(words), -1, _LOAD_WORDS, 2, 16 // bits).permute(0, 1, 4, 2, 3).flatten(1)

"""Reads checkpoints whose matrices are packed integers or bytes (GPTQ, AWQ, compressed-tensors), dequantised.

A matrix X is published as several tensors (X.qweight and more) and appears here as X.weight [rows, columns], float32.
The formats are those that AutoGPTQ (Frantar et al. 2022), AutoAWQ (Lin et al. 2023) and compressed-tensors write.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from planner.errors import InvalidCheckpoint
from worker.models.packing import PackedFormat, Packing
from worker.models.weights import TensorSource

_WORD_BITS = 32
# Where AWQ's kernels want the columns of each word of eight.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The tensor that stands for a matrix, and those that belong to it.
_MAIN = {
    PackedFormat.GPTQ: "qweight",
    PackedFormat.AWQ: "qweight",
    PackedFormat.COMPRESSED_INTEGERS: "weight_packed",
    PackedFormat.PLAIN_INTEGERS: "weight_scale",
    PackedFormat.FLOATS: "weight_scale",
}
_PARTS = frozenset(
    {
        "qweight", "qzeros", "scales", "g_idx", "weight", "weight_packed", "weight_scale", "weight_zero_point",
        "weight_shape", "weight_g_idx", "input_scale", "input_zero_point",
    }
)  # fmt: skip


class PackedSource:
    """A `TensorSource` over another one. Raises `InvalidCheckpoint` naming the matrix whose parts do not fit."""

    def __init__(self, source: TensorSource, packing: Packing) -> None:
        self._source = source
        self._packing = packing
        published = frozenset(source.names())
        ending = "." + _MAIN[packing.format]
        self._packed = {name.removesuffix(ending) for name in published if name.endswith(ending)}
        self._there = published
        self._names = {name for name in published if not self._is_part(name) and not self._is_idle_bias(name)}
        self._names |= {f"{matrix}.weight" for matrix in self._packed}

    def names(self) -> Collection[str]:
        return self._names

    def read(self, name: str) -> Tensor:
        matrix, _, part = name.rpartition(".")
        if part != "weight" or matrix not in self._packed:
            return self._source.read(name)
        try:
            return self._unpack(matrix)
        except (RuntimeError, IndexError) as error:  # what torch raises where shapes do not fit
            raise InvalidCheckpoint(f"the parts of {matrix} do not fit together: {error}") from error

    def _unpack(self, matrix: str) -> Tensor:
        unpack: Callable[[str], Tensor] = {
            PackedFormat.GPTQ: self._gptq,
            PackedFormat.AWQ: self._awq,
            PackedFormat.COMPRESSED_INTEGERS: self._compressed,
            PackedFormat.PLAIN_INTEGERS: self._scaled,
            PackedFormat.FLOATS: self._scaled,
        }[self._packing.format]
        return unpack(matrix).contiguous()

    def _gptq(self, matrix: str) -> Tensor:
        bits = self._packing.bits
        values = unpacked(self._part(matrix, "qweight"), bits, dim=0)
        stored = unpacked(self._part(matrix, "qzeros"), bits, dim=1)
        # A zero point of 0 was stored as -1.
        zeros: Tensor = (stored + self._packing.zero_offset) & (2**bits - 1)
        scales = self._part(matrix, "scales").float()
        group_of = self._optional(matrix, "g_idx")
        if group_of is None:
            group_of = _group_of(len(values), len(scales))
        index = group_of.long()
        return ((values - zeros[index]).float() * scales[index]).t()

    def _awq(self, matrix: str) -> Tensor:
        values, zeros = (_awq_columns(unpacked(self._part(matrix, part), 4, dim=1)) for part in ("qweight", "qzeros"))
        scales = self._part(matrix, "scales").float()
        index = _group_of(len(values), len(scales))
        return ((values - zeros[index]).float() * scales[index]).t()

    def _compressed(self, matrix: str) -> Tensor:
        bits = self._packing.bits
        rows, columns = self._part(matrix, "weight_shape").tolist()
        middle = 2 ** (bits - 1)
        values = unpacked(self._part(matrix, "weight_packed"), bits, dim=1)[:rows, :columns] - middle
        packed_zeros = self._optional(matrix, "weight_zero_point")
        zeros = None if packed_zeros is None else unpacked(packed_zeros, bits, dim=0)[:rows] - middle
        return self._by_scale(matrix, values, zeros)

    def _scaled(self, matrix: str) -> Tensor:
        values = self._part(matrix, "weight")
        return self._by_scale(matrix, values.float(), self._optional(matrix, "weight_zero_point"))

    def _by_scale(self, matrix: str, values: Tensor, zeros: Tensor | None) -> Tensor:
        """Scales [rows, groups], [rows, 1], [rows] or one; columns belong to groups in order unless g_idx says so."""
        scales = _as_matrix(self._part(matrix, "weight_scale").float())
        group_of = self._optional(matrix, "weight_g_idx")
        index = _group_of(values.shape[1], scales.shape[1]) if group_of is None else group_of.long()
        shifted = values.float() if zeros is None else values.float() - _as_matrix(zeros.float())[:, index]
        return shifted * scales[:, index]

    def _part(self, matrix: str, part: str) -> Tensor:
        found = self._optional(matrix, part)
        if found is None:
            raise InvalidCheckpoint(f"the checkpoint has no tensor {matrix}.{part}")
        return found

    def _optional(self, matrix: str, part: str) -> Tensor | None:
        name = f"{matrix}.{part}"
        return self._source.read(name) if name in self._there else None

    def _is_part(self, name: str) -> bool:
        matrix, _, part = name.rpartition(".")
        return matrix in self._packed and part in _PARTS

    def _is_idle_bias(self, name: str) -> bool:
        """AutoGPTQ writes a bias of zeros where the model has none."""
        matrix, _, part = name.rpartition(".")
        if part != "bias" or matrix not in self._packed or self._packing.format is not PackedFormat.GPTQ:
            return False
        return not bool(self._source.read(name).any())


def unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers of `bits` bits, int32, from words of 32 along `dim`, the lowest bits first."""
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    shape = [1, 1, 1]
    shape[dim + 1] = len(shifts)
    numbers: Tensor = (words.to(torch.int32).unsqueeze(dim + 1) >> shifts.view(shape)) & (2**bits - 1)
    return numbers.flatten(dim, dim + 1)


def _awq_columns(numbers: Tensor) -> Tensor:
    """Undo the order within each word of eight columns."""
    words = numbers.view(len(numbers), -1, len(_AWQ_ORDER))
    ordered = torch.empty_like(words)
    ordered[:, :, list(_AWQ_ORDER)] = words
    return ordered.flatten(1)


def _group_of(size: int, num_groups: int) -> Tensor:
    if size % num_groups:
        raise InvalidCheckpoint(f"{size} columns do not fall into {num_groups} groups of one size")
    return torch.arange(size) // (size // num_groups)


def _as_matrix(values: Tensor) -> Tensor:
    return values.reshape(-1, 1) if values.dim() < 2 else values

"""The tensors of a GGUF file: whether they are all there, and each of them dequantised. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from planner.errors import InvalidCheckpoint
from worker.gguf_layout import StoredTensor, Value, read_gguf_layout


class GgufTensors:
    """Keeps the file mapped while it lives. Nothing is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        """Raises `InvalidCheckpoint` for a file that is damaged or cut off."""
        layout = read_gguf_layout(path)
        self.metadata: Mapping[str, Value] = layout.metadata
        self.tensors: Mapping[str, StoredTensor] = layout.tensors
        self._file_name = path.name
        self._bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        for name, tensor in self.tensors.items():
            end = tensor.offset + math.prod(self._stored_shape(name))
            if end > self._bytes.size:
                raise InvalidCheckpoint(
                    f"{path.name} is not a whole GGUF file: {name} ends at byte {end:,} of {self._bytes.size:,}"
                )

    def read(self, name: str) -> NDArray[np.float32]:
        """The tensor, in its shape; a view of the file where it is stored as it is. Raises `InvalidCheckpoint` when its
        format is not known."""
        kind, stored = self.stored(name)
        try:
            values: NDArray[np.float32] = gguf.dequantize(stored, kind)
        except (NotImplementedError, ValueError) as error:
            raise self._unreadable(name, error) from error
        return values

    def stored(self, name: str) -> tuple[gguf.GGMLQuantizationType, NDArray[np.uint8]]:
        """The tensor as it is in the file: its type, and the bytes of its rows."""
        tensor, shape = self.tensors[name], self._stored_shape(name)
        stored = self._bytes[tensor.offset : tensor.offset + math.prod(shape)].reshape(shape)
        return gguf.GGMLQuantizationType(tensor.kind), stored

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        """In bytes: the rows of a tensor are stored one after another."""
        tensor = self.tensors[name]
        try:
            shape: tuple[int, ...] = gguf.quant_shape_to_byte_shape(
                tensor.shape, gguf.GGMLQuantizationType(tensor.kind)
            )
        except (ValueError, IndexError) as error:
            raise self._unreadable(name, error) from error
        return shape

    def _unreadable(self, name: str, error: Exception) -> InvalidCheckpoint:
        return InvalidCheckpoint(f"tensor {name} of {self._file_name} cannot be read: {error}")

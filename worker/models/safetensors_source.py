"""Reads a folder of safetensors files, sharded or not, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from planner.errors import InvalidCheckpoint
from worker.models.safetensors_files import file_names


class SafetensorsSource:
    """A `TensorSource` over a folder. Keeps the files mapped while it lives."""

    def __init__(self, folder: Path) -> None:
        """Raises `InvalidCheckpoint` naming the file that is missing, truncated or corrupt."""
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        for file_name in file_names(folder):
            try:
                opened: Any = safe_open(folder / file_name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InvalidCheckpoint(f"{file_name} cannot be read: {error}") from error
            self._files[file_name] = opened
            for name in opened.keys():  # noqa: SIM118 (not a mapping)
                if name in self._file_of:
                    raise InvalidCheckpoint(f"tensor {name} is both in {self._file_of[name]} and in {file_name}")
                self._file_of[name] = file_name

    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def read(self, name: str) -> Tensor:
        file_name = self._file_of[name]
        try:
            return cast(Tensor, self._files[file_name].get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise InvalidCheckpoint(f"tensor {name} of {file_name} cannot be read: {error}") from error

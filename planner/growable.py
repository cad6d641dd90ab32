"""An integer array that grows at its end. It gives out read-only views, so that a step costs no copy of a history."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Int = TypeVar("Int", np.int32, np.int64)

_SMALLEST = 16


class Growable(Generic[Int]):
    """One-dimensional, amortised O(1) a value.

    A view keeps its values for as long as it is held, unless the array is truncated below the view's end and then
    extended again. `length` is for its methods to change.
    """

    __slots__ = ("_buffer", "_readonly", "length")

    def __init__(self, values: npt.NDArray[Int]) -> None:
        self.length = len(values)
        self._resize(values, max(_SMALLEST, 2 * self.length))

    def __len__(self) -> int:
        return self.length

    def append(self, value: int) -> None:
        length = self.length
        if length == len(self._buffer):
            self._resize(self._buffer, 2 * length)
        self._buffer[length] = value
        self.length = length + 1

    def extend(self, values: npt.NDArray[Int]) -> None:
        end = self.length + len(values)
        if end > len(self._buffer):
            self._resize(self._buffer[: self.length], 2 * end)
        self._buffer[self.length : end] = values
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget the values from `length` on; `length` must not exceed the present one."""
        assert 0 <= length <= self.length
        self.length = length

    def view(self, start: int = 0, end: int | None = None) -> npt.NDArray[Int]:
        """Read-only view of [start, end), end being the array's own by default and at most."""
        view: npt.NDArray[Int] = self._readonly[start : self.length if end is None else min(end, self.length)]
        return view

    def _resize(self, values: npt.NDArray[Int], capacity: int) -> None:
        self._buffer: npt.NDArray[Int] = np.empty(capacity, values.dtype)
        self._buffer[: len(values)] = values
        self._readonly: npt.NDArray[Int] = self._buffer.view()
        self._readonly.flags.writeable = False

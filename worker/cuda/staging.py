"""Pinned host memory of fixed shape that copies to and from the GPU go through in turn, and how to know that they did.

For arrays of any shape `worker.cuda.pinned_pages` is.
"""

from __future__ import annotations

import torch

RING = 4


class Moment:
    """A point in the device's work, once recorded; without a device everything has already happened."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class StagingRing:
    """Pinned host buffers used in turn, each with the moment after which it may be used again."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(RING)]
        self._moments = [Moment(device) for _ in range(RING)]
        self._next = 0

    def take(self) -> tuple[torch.Tensor, Moment]:
        """The least recently used buffer, free again, and its moment, to be recorded after the copy."""
        turn, self._next = self._next, (self._next + 1) % RING
        self._moments[turn].wait()
        return self._buffers[turn], self._moments[turn]

"""Brings small arrays to the GPU without waiting for it: pinned memory in pages, each used again when it is free.

Asking the driver for pinned memory in the middle of a step may wait for what the device is doing; here all of it is
taken at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.cuda.staging import Moment

NUM_PAGES = 4
PAGE_BYTES = 4 << 20
# Copies begin where any dtype may, and no two share a line of the processor's cache.
_ALIGNMENT = 256


class Ready(Protocol):
    """A point in the device's work; see `worker.cuda.staging.Moment`."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


class PinnedPages:
    """Owner and only caller: the executor, whose stream is torch's current one."""

    def __init__(
        self,
        device: torch.device,
        page_bytes: int = PAGE_BYTES,
        moment: Callable[[torch.device], Ready] = Moment,
    ) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._pages = [torch.empty(page_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(NUM_PAGES)]
        self._left = [moment(device) for _ in range(NUM_PAGES)]
        self._page = 0
        self._used = 0

    def upload(self, values: npt.NDArray[Any]) -> Tensor:
        """A new tensor on the device with these values, behind everything launched so far. Returns at once, but for an
        array that is larger than a page, for which torch pins memory."""
        dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
        if values.nbytes > len(self._pages[0]):
            host = torch.empty(values.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
            host.numpy()[...] = values
            return host.to(self._device, non_blocking=True)
        host = self._room(values.nbytes).view(dtype).view(values.shape)
        host.numpy()[...] = values
        return torch.empty(values.shape, dtype=dtype, device=self._device).copy_(host, non_blocking=True)

    def _room(self, num_bytes: int) -> Tensor:
        """uint8[num_bytes] of a page that nobody has."""
        if self._used + num_bytes > len(self._pages[0]):
            self._turn()
        first = self._used
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._pages[self._page][first : first + num_bytes]

    def _turn(self) -> None:
        """On to the page that was left the longest ago, once its copies are done."""
        self._left[self._page].record()
        self._page = (self._page + 1) % NUM_PAGES
        self._left[self._page].wait()
        self._used = 0

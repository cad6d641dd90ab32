"""Draws from rows of logits on the device, by its sampler, where settings come with the rows and not from slots.

For executors that keep nothing of their sequences on the device. What the sampler does not do (penalties, biases,
masks, grammars) is done to a copy of the logits before. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.cuda.changes import change_rows
from worker.cuda.launch import aligned
from worker.cuda.pinned_pages import PAGE_BYTES, PinnedPages
from worker.cuda.sampler import GpuSampler
from worker.sampler import Draw, DrawnRows

# Every row of four-byte numbers begins at a multiple of 16 bytes.
_ALIGNED = 4


class RowDraws:
    """A `worker.sampler.DrawRows`. Owner: the executor."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        """More than `max_rows` rows are drawn in several launches."""
        self._sampler = GpuSampler(max_rows, vocab_size, device)
        self._slots = torch.arange(max_rows, dtype=torch.int32, device=device)
        # A page holds the masks of all rows.
        self._upload = PinnedPages(device, max(PAGE_BYTES, max_rows * vocab_size // 4)).upload

    def __call__(self, logits: Tensor, draws: Sequence[Draw]) -> DrawnRows:
        """One token a row of float32[N, vocab_size], which are finite and stay as they are."""
        changes = any(draw.changes_logits for draw in draws)
        if changes:
            logits = logits.clone(memory_format=torch.contiguous_format)
            change_rows(logits, draws, self._upload)
        if all(draw.sampling.greedy for draw in draws):
            return DrawnRows(logits.argmax(dim=-1), ~logits.amax(dim=-1).isfinite() if changes else None)
        outputs = torch.empty((2, aligned(len(draws), _ALIGNED)), dtype=torch.int32, device=logits.device)
        tokens, bad = outputs[:, : len(draws)].unbind(0)
        at_once = len(self._slots)
        for first in range(0, len(draws), at_once):
            rows = slice(first, first + at_once)
            self._draw(logits[rows], draws[rows], tokens[rows], bad[rows])
        return DrawnRows(tokens.to(torch.int64), bad.bool() if changes else None)

    def _draw(self, logits: Tensor, draws: Sequence[Draw], tokens: Tensor, bad: Tensor) -> None:
        params = [draw.sampling for draw in draws]
        floats = _table(
            [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]], np.float32
        )
        temperature, top_p, min_p = self._upload(floats).unbind(0)
        # The sampler draws for the position behind as many as there are.
        integers = _table([[p.top_k for p in params], [draw.position - 1 for draw in draws]], np.int32)
        top_k, length = self._upload(integers).unbind(0)
        # The same 64 bits, as a torch integer has a sign.
        seed = self._upload(np.array([p.seed for p in params], dtype=np.uint64).view(np.int64))
        slots = self._slots[: len(draws)]
        self._sampler.sample(logits, slots, temperature, top_k, top_p, min_p, seed, length, tokens, bad)


def _table(rows: Sequence[Sequence[float]], dtype: type[np.float32 | np.int32]) -> npt.NDArray[Any]:
    """Rows of equal length, each of which begins where a kernel expects it."""
    table = np.zeros((len(rows), aligned(len(rows[0]), _ALIGNED)), dtype=dtype)
    table[:, : len(rows[0])] = rows
    return table

"""Prefill forwards of batches in which some row has an adapter: the model's own, and each row's adapter beside it.

A `Prefill` for captured forwards as much as for launched ones: whose adapter a row has lies at one address, and is
uploaded before a forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.step import Chunk
from worker.batch import Piece
from worker.cuda.decode_state import NO_ADAPTER
from worker.cuda.lora import CudaLoraSlots
from worker.cuda.prefill import PrefillChain
from worker.cuda.prefill_graphs import PrefillGraphs
from worker.cuda.prefill_plan import PrefillPlan
from worker.cuda.staging import StagingRing


class AdaptedPrefill:
    """Owner of the table of its rows' adapters. Owner and only caller: the executor."""

    def __init__(self, chain: PrefillChain, adapters: CudaLoraSlots, max_tokens: int) -> None:
        """Of at most `max_tokens` tokens a forward."""
        self._chain = chain
        self._adapters = adapters
        self._row_slots = torch.full((max_tokens,), NO_ADAPTER, dtype=torch.int32, device=adapters.device)
        self._staging = StagingRing((max_tokens,), torch.int32, adapters.device)

    def place(self, pieces: Sequence[Piece]) -> None:
        """Upload which adapters the rows of the next forward have; any rows behind them are padding."""
        staging, copied = self._staging.take()
        host = staging.numpy()
        host.fill(NO_ADAPTER)
        slots = self._adapters.slots_of([piece.chunk.adapter for piece in pieces])
        for piece, slot in zip(pieces, slots, strict=True):
            host[piece.row : piece.row + piece.length] = slot
        self._row_slots.copy_(staging, non_blocking=True)
        copied.record()

    def hidden(self, tokens: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor:
        """As `PrefillChain.hidden`."""
        beside = self._adapters.beside(self._row_slots[: len(tokens)])
        return self._chain.hidden(tokens, plan, rows, beside)


@dataclass(frozen=True, slots=True)
class Adapted:
    """What an executor needs to compute with adapters; `captured` are forwards of `prefill` for few tokens. Its decodes
    are made over the same `adapters`."""

    adapters: CudaLoraSlots
    prefill: AdaptedPrefill
    captured: PrefillGraphs | None

    def rows_of(self, chunks: Sequence[Chunk]) -> list[int]:
        """For decodes of `chunks`: each row's adapter as the device is told; empty where no row has one."""
        if all(chunk.adapter is None for chunk in chunks):
            return []
        return self.adapters.slots_of([chunk.adapter for chunk in chunks])

    def placed(self, pieces: Sequence[Piece]) -> bool:
        """Whether some piece has an adapter; the next forward is then told whose they are."""
        if all(piece.chunk.adapter is None for piece in pieces):
            return False
        self.prefill.place(pieces)
        return True

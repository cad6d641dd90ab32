"""Everything about running sequences that a captured decode step reads or writes, at fixed device addresses.

A sequence lives in a *slot* for as long as it decodes; a step's *rows* name the slots they work for. So sequences move
between rows, and slots between sequences, without recapture. The last slot is scratch: padding rows work for it, it
never advances, and its K and V go to the pool's scratch cell.

Owner: the executor, on the engine thread. Everything is ordered on torch's current stream; nothing here waits for the
device, except that staging waits for a copy of some calls ago (`worker.cuda.staging`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt
import torch

from planner.request import CellArray, SamplingParams
from worker.cuda.launch import aligned
from worker.cuda.pinned_pages import PinnedPages
from worker.cuda.staging import Moment, StagingRing
from worker.sampler import Upload

NO_ADAPTER = -1
"""On the device, of a row without an adapter."""
# Every row table starts at a multiple of 128 bytes, so that one compiled kernel serves any number of rows.
_ALIGNED_ROWS = 32


@dataclass(frozen=True, slots=True)
class SlotEntry:
    """A sequence that enters a slot: its next step feeds `token` at position `length`, after the cells it has.

    `cells` int32[length - first] are those of positions from `first` on; the slot has the ones before already. `token`
    None: it is on the device only, and `set_last_tokens` will put it in place.
    """

    slot: int
    length: int
    cells: CellArray
    token: int | None
    sampling: SamplingParams
    first: int = 0


class RowFault(IntFlag):
    """Why a row's token means nothing, as the device says it; 0: it means something."""

    NOT_FINITE = 1
    """Of the logits that the forward gave, the largest is not finite, or there is a NaN."""
    NOTHING_LEFT = 2
    """Of the logits that the row's draw has changed."""


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens of a step on their way to the host. `tokens` and `bad` (`RowFault`s) are int32[rows], valid after `wait`
    and until `RING` later fetches."""

    tokens: npt.NDArray[np.int32]
    bad: npt.NDArray[np.int32]
    ready: Moment

    def wait(self) -> None:
        self.ready.wait()


class DecodeState:
    """Per row (`max_rows`): int32 `row_slots`, `new_cells`, `row_adapters` (the adapter's place on the device, or
    `NO_ADAPTER`), `out_tokens`, `bad_rows`. Per slot (`num_slots` + 1):
    int32 `last_token`, `length`, `table` [slots, context] of cells, `top_k`; float32 `temperature`, `top_p`, `min_p`;
    int64 `seed` (the 64 bits of an unsigned one). `length` counts the positions before `last_token`, so that the step
    feeds the token at position `length` and draws the one for position `length + 1`."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_rows: int,
        context: int,
        scratch_cell: int,
        device: torch.device,
        upload: Upload | None = None,
    ) -> None:
        """`upload` brings arrays to `device` without waiting for it; None: through pages of its own."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        slots = num_slots + 1
        self.num_slots, self.max_rows, self.context, self.scratch_cell = num_slots, max_rows, context, scratch_cell
        self.device = device
        padded = aligned(max_rows, _ALIGNED_ROWS)
        self._rows = zeros(3, padded)
        self.row_slots, self.new_cells, self.row_adapters = self._rows[:, :max_rows].unbind()
        # Until the first `set_rows` all rows are padding, so that a step may run at once (to be captured, say).
        self.row_slots.fill_(num_slots)
        self.new_cells.fill_(scratch_cell)
        self.row_adapters.fill_(NO_ADAPTER)
        self._outputs = zeros(2, padded)
        self.out_tokens, self.bad_rows = self._outputs[0, :max_rows], self._outputs[1, :max_rows]
        self.last_token, self.length, self.top_k = zeros(slots), zeros(slots), zeros(slots)
        self.table = zeros(slots, context)
        self.temperature = zeros(slots, dtype=torch.float32)
        self.top_p = torch.ones(slots, dtype=torch.float32, device=device)
        self.min_p = zeros(slots, dtype=torch.float32)
        self.seed = zeros(slots, dtype=torch.int64)
        self._rows_staging = StagingRing((3, padded), torch.int32, device)
        self._tokens_staging = StagingRing((2, padded), torch.int32, device)
        self._upload = upload or PinnedPages(device).upload

    @property
    def scratch_slot(self) -> int:
        return self.num_slots

    def move_scratch(self, cell: int) -> None:
        """From now on padding rows write to this cell. All rows are padding until the next `set_rows`."""
        self.scratch_cell = cell
        self.set_rows((), ())

    def set_rows(self, slots: Sequence[int], cells: Sequence[int], adapters: Sequence[int] = ()) -> None:
        """The next step's rows: row r works for slots[r], whose new token goes to cells[r], with adapters[r] beside it
        (`NO_ADAPTER` where there is none, or for all). All further rows are padding. A slot may appear once."""
        assert len(slots) == len(cells) <= self.max_rows
        assert len(adapters) in (0, len(slots))
        assert len(set(slots)) == len(slots), "a slot may work in one row only"
        staging, copied = self._rows_staging.take()
        host = staging.numpy()
        host[0, : len(slots)], host[0, len(slots) :] = slots, self.scratch_slot
        host[1, : len(cells)], host[1, len(cells) :] = cells, self.scratch_cell
        host[2, : len(adapters)], host[2, len(adapters) :] = adapters, NO_ADAPTER
        self._rows.copy_(staging, non_blocking=True)
        copied.record()

    def enter(self, entries: Sequence[SlotEntry]) -> None:
        """Puts sequences into their slots; slots not named keep what they have."""
        if not entries:
            return
        for entry in entries:
            assert 0 <= entry.slot < self.num_slots, entry.slot
            assert entry.first + len(entry.cells) == entry.length < self.context, (len(entry.cells), entry.length)
        slots = self._upload(np.array([e.slot for e in entries], np.int64))
        known = [e for e in entries if e.token is not None]
        if known:
            tokens = self._upload(np.array([e.token for e in known], np.int32))
            self.last_token.index_copy_(0, self._upload(np.array([e.slot for e in known], np.int64)), tokens)
        self.length.index_copy_(0, slots, self._upload(np.array([e.length for e in entries], np.int32)))
        self.seed.index_copy_(
            0, slots, self._upload(np.array([e.sampling.seed for e in entries], np.uint64).view(np.int64))
        )
        self.top_k.index_copy_(0, slots, self._upload(np.array([e.sampling.top_k for e in entries], np.int32)))
        for target, name in ((self.temperature, "temperature"), (self.top_p, "top_p"), (self.min_p, "min_p")):
            values = np.array([getattr(e.sampling, name) for e in entries], np.float32)
            target.index_copy_(0, slots, self._upload(values))
        where = np.concatenate([e.slot * self.context + np.arange(e.first, e.length, dtype=np.int64) for e in entries])
        cells = np.concatenate([e.cells for e in entries])
        self.table.view(-1).index_copy_(0, self._upload(where), self._upload(cells.astype(np.int32, copy=False)))

    def set_last_tokens(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """last_token[slots] = tokens; both on the device, int64[n] and integers[n]."""
        self.last_token.index_copy_(0, slots, tokens.to(torch.int32))

    def fetch_tokens(self, num_rows: int) -> PendingTokens:
        """Starts copying the step's tokens to the host, behind everything launched so far."""
        staging, copied = self._tokens_staging.take()
        staging.copy_(self._outputs, non_blocking=True)
        copied.record()
        host = staging.numpy()
        return PendingTokens(host[0, :num_rows], host[1, :num_rows], copied)

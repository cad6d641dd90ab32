"""Captured prefill forwards of a few widths, for steps whose launches would take longer than their work.

A prompt of a hundred tokens beside some decodes is a millisecond or two of work and hundreds of launches. Here the same
forward is captured for some numbers of tokens; a step runs in the narrowest that holds it, padded with tokens that go
to the scratch cell and are read by nobody. What a replay reads lies at fixed addresses and is uploaded before it. Not
for wide prefills: they keep the device busy for longer than launching them takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from planner.request import TokenArray
from worker.attention import Span
from worker.cuda.fixed_prefill_plan import fixed_plan, fixed_table_size, write_fixed
from worker.cuda.graphs import Capture, Forward, captures
from worker.cuda.prefill_plan import PrefillPlan
from worker.cuda.staging import StagingRing
from worker.executor import ProgramInfo
from worker.kv_pool import KvPool

PREFILL_WIDTHS = (16, 32, 64, 128, 256, 512, 1024)
# Cells of all chunks of a captured forward together; their list is a megabyte.
MAX_CELLS = 2**18


def rows_given(info: ProgramInfo) -> int:
    """Rows that captured prefills give: of all that may draw at once, and no fewer than a prefill ever selects."""
    return max(info.widths[-1], info.min_prefill_tokens)


class Prefill(Protocol):
    """`worker.cuda.prefill.PrefillChain`, or something around it."""

    def hidden(self, tokens: Tensor, plan: PrefillPlan, rows: Tensor) -> Tensor: ...


class PrefillGraphs:
    """Owner of all that captured prefills read, but weights and pool. Owner and only caller: the executor."""

    def __init__(
        self,
        prefill: Prefill,
        widths: Sequence[int],
        *,
        max_rows: int,
        shared_heads: int,
        pool: KvPool,
        capture: Capture | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`widths` ascend. A forward gives at most `max_rows` rows, and writes to `pool`. Capture while nothing else
        runs on the device; `capture` is how, or else on `stream`."""
        self._prefill, self._widths, self._pool, self._capture = prefill, tuple(widths), pool, capture
        self._max_rows, self._shared_heads, self._stream = max_rows, shared_heads, stream
        widest, device = self._widths[-1], pool.keys.device
        self._tokens = torch.zeros(widest, dtype=torch.int64, device=device)
        self._rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        table_size = fixed_table_size(widest, shared_heads, MAX_CELLS)
        self._table = torch.zeros(table_size, dtype=torch.int32, device=device)
        self._staged_numbers = StagingRing((widest + max_rows,), torch.int64, device)
        self._staged_tables = StagingRing((table_size,), torch.int32, device)
        self._width, self._num_rows = widest, 0
        self._forwards: dict[int, Forward] = {}
        self.rebind()

    def rebind(self) -> None:
        """Capture all forwards, again if the pool has moved."""
        self._forwards = {}  # the old graphs' memory serves the new ones
        self._rows.zero_()  # a capture runs its forward, and a narrow one has not all rows that the last replay had
        capture = self._capture or captures(self._stream)
        for width in reversed(self._widths):
            self._upload_table(width, [])
            self._forwards[width] = capture(self._forward(width))

    def takes(self, spans: Sequence[Span], num_rows: int) -> bool:
        """Whether a captured forward holds these chunks and gives so many rows."""
        num_tokens = sum(span.length for span in spans)
        num_cells = sum(span.start + span.length for span in spans)
        fits = num_tokens <= self._widths[-1] and num_cells <= MAX_CELLS
        return fits and num_rows <= min(self._max_rows, self._widths[-1])

    def place(self, spans: Sequence[Span], tokens: TokenArray, rows: Sequence[int]) -> Tensor:
        """Upload what the next `hidden` reads, of chunks that it takes. Returns the tokens on the device, int64, which
        may be changed until then."""
        self._width = next(width for width in self._widths if width >= max(len(tokens), len(rows)))
        self._num_rows = len(rows)
        self._upload_table(self._width, spans)
        staging, copied = self._staged_numbers.take()
        host, widest = staging.numpy(), len(self._tokens)
        host[: len(tokens)], host[len(tokens) : self._width] = tokens, 0
        host[widest : widest + len(rows)], host[widest + len(rows) :] = rows, 0
        self._tokens[: self._width].copy_(staging[: self._width], non_blocking=True)
        self._rows.copy_(staging[widest:], non_blocking=True)
        copied.record()
        return self._tokens[: len(tokens)]

    def hidden(self) -> Tensor:
        """What the last layer gives in the rows that were placed: [K, E], until the next forward."""
        return self._forwards[self._width]()[: self._num_rows]

    def _forward(self, width: int) -> Forward:
        plan = fixed_plan(self._table, width, self._shared_heads, MAX_CELLS)
        tokens = self._tokens[:width]
        prefill, rows = self._prefill, self._rows[: min(self._max_rows, width)]
        return lambda: prefill.hidden(tokens, plan, rows)

    def _upload_table(self, width: int, spans: Sequence[Span]) -> None:
        staging, copied = self._staged_tables.take()
        used = write_fixed(staging.numpy(), spans, width, self._shared_heads, self._pool.scratch_cell)
        self._table[:used].copy_(staging[:used], non_blocking=True)
        copied.record()

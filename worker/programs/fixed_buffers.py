"""What captured methods of a program read and write, at fixed addresses: one set for all, as one runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from worker.cuda.launch import aligned
from worker.cuda.lone_plan import Int32Array
from worker.cuda.staging import StagingRing
from worker.programs.forwards import Rows

# Compiled code takes rows that begin at a multiple of 16 bytes.
_ALIGNED = 32


class FixedBuffers:
    """Int64 `tokens` and `positions` [most_tokens] and `selector` [most_rows], int32 `table` [table_entries], float32
    `logits` [most_rows, vocab_size]. Everything is ordered on torch's current stream; nothing here waits for the
    device, but for an upload of some calls ago."""

    def __init__(
        self, *, most_tokens: int, most_rows: int, table_entries: int, vocab_size: int, device: torch.device
    ) -> None:
        tokens, rows = (aligned(most, _ALIGNED) for most in (most_tokens, most_rows))
        self._numbers = torch.zeros(2 * tokens + rows, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.selector = torch.split(self._numbers, [tokens, tokens, rows])
        self.table = torch.zeros(table_entries, dtype=torch.int32, device=device)
        self.logits = torch.zeros((most_rows, vocab_size), dtype=torch.float32, device=device)
        self._staged_numbers = StagingRing((len(self._numbers),), torch.int64, device)
        self._staged_tables = StagingRing((table_entries,), torch.int32, device)

    def place(self, rows: Rows, selector: Sequence[int], write_table: Callable[[Int32Array], int]) -> None:
        """Upload what the next run reads: `rows`, whose further tokens are padding, and the table, of which
        `write_table` writes so many entries as it returns."""
        staging, copied = self._staged_numbers.take()
        host, tokens = staging.numpy(), len(self.tokens)
        host[:] = 0
        host[: len(rows.tokens)] = rows.tokens
        host[tokens : tokens + len(rows.positions)] = rows.positions
        host[2 * tokens : 2 * tokens + len(selector)] = selector
        self._numbers.copy_(staging, non_blocking=True)
        copied.record()
        staging, copied = self._staged_tables.take()
        used = write_table(staging.numpy())
        self.table[:used].copy_(staging[:used], non_blocking=True)
        copied.record()

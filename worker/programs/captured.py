"""A program's decodes as captured CUDA graphs: one a width, the largest first, all in one memory pool.

What a replay reads lies at fixed addresses and is uploaded before it; what it launches depends on the width alone. All
widths are captured at the start: each takes three runs of a decode, so that the whole ladder takes less than a second,
and a capture in the middle of the service would wait for the device, and take memory that the pool has by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from worker.attention import Span
from worker.cuda.decode_state import StagingRing
from worker.cuda.graphs import Capture, Forward, captures
from worker.cuda.lone_plan import layout_of, table_size, write_lone
from worker.kv_pool import KvPool
from worker.programs.forwards import CompiledMethod, Rows, padded

# Cells of all sequences of a captured decode together. Their list is uploaded for each, which takes a thousandth of the
# time that reading the cells does.
MAX_CELLS = 2**20


class CapturedDecodes:
    """Owner of all that captured decodes read and write, but weights and pool. Owner and only caller:
    `ProgramForwards`."""

    def __init__(
        self,
        decodes: Mapping[int, CompiledMethod],
        pool: KvPool,
        *,
        vocab_size: int,
        num_plans: int,
        max_cells: int = MAX_CELLS,
        capture: Capture | None = None,
    ) -> None:
        """`decodes` by width, over `pool`; each takes `num_plans` plans. Capture while nothing else runs on the
        device; `capture` is how."""
        widest, device = max(decodes), pool.keys.device
        self._pool, self._num_plans, self._max_cells = pool, num_plans, max_cells
        room = -(-widest // 32) * 32  # compiled code takes rows that begin at a multiple of 16 bytes
        self._numbers = torch.zeros((3, room), dtype=torch.int64, device=device)  # tokens, positions, selector
        self._table = torch.zeros(table_size(widest, max_cells), dtype=torch.int32, device=device)
        self._logits = torch.zeros((widest, vocab_size), dtype=torch.float32, device=device)
        self._staged_numbers = StagingRing((3, room), torch.int64, device)
        self._staged_tables = StagingRing((len(self._table),), torch.int32, device)
        self._forwards: dict[int, Forward] = {}
        capture = capture or captures()
        nothing = Rows.nothing()
        with torch.inference_mode():
            for width in sorted(decodes, reverse=True):
                self._place(padded(nothing, width, pool.scratch_cell), [0] * width)
                self._forwards[width] = capture(self._forward(decodes[width], width))

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether the cells of these sequences fit into what a replay reads."""
        return sum(len(span.cells) for span in spans) <= self._max_cells

    def run(self, rows: Rows, selector: Sequence[int]) -> Tensor:
        """Logits, float32 [width, vocab_size], of rows `selector` of a decode that is as wide as there are `rows`; they
        last until the next run. Returns at once."""
        self._place(rows, selector)
        return self._forwards[len(rows.spans)]()

    def _place(self, rows: Rows, selector: Sequence[int]) -> None:
        width = len(rows.spans)
        staging, copied = self._staged_numbers.take()
        host = staging.numpy()
        host[0, :width], host[1, :width], host[2, :width] = rows.tokens, rows.positions, selector
        self._numbers.copy_(staging, non_blocking=True)
        copied.record()
        staging, copied = self._staged_tables.take()
        used = write_lone(staging.numpy(), rows.spans, width)
        self._table[:used].copy_(staging[:used], non_blocking=True)
        copied.record()

    def _forward(self, method: CompiledMethod, width: int) -> Forward:
        tokens, positions, selector = self._numbers[:, :width].unbind(0)
        tables = [self._table[: table_size(width, self._max_cells)]] * self._num_plans
        layouts = [layout_of(width, self._max_cells)] * self._num_plans
        keys, values, logits = self._pool.keys, self._pool.values, self._logits[:width]

        def forward() -> Tensor:
            # Copied, so that the graphs of all widths share the memory that the method gives its logits in.
            return logits.copy_(method(tokens, positions, selector, keys, values, tables, layouts))

        return forward

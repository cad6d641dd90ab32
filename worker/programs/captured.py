"""A program's methods as captured CUDA graphs: decodes of each width and short prefills, all in one memory pool.

What a replay reads lies at fixed addresses and is uploaded before it; what it launches depends on the width alone. A
prefill runs in the narrowest width that holds it, padded with tokens that go to the scratch cell; wide ones keep the
device busy for longer than launching them takes, and are not captured. Everything is captured at the start: each takes
three runs of a forward, which is about a second together, and a capture in the middle of the service would wait for the
device, and take memory that the pool has by then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from planner.slices import pad_selector
from worker.attention import Span
from worker.cuda.fixed_prefill_plan import fixed_layout, fixed_table_size, write_fixed
from worker.cuda.graphs import Capture, Forward, captures
from worker.cuda.lone_plan import Int32Array, layout_of, table_size, write_lone
from worker.kv_pool import KvPool
from worker.programs.fixed_buffers import FixedBuffers
from worker.programs.forwards import CompiledMethod, Methods, Rows, padded

# Cells of all sequences of a captured forward together. Their list is uploaded for each, which takes a thousandth of
# the time that reading the cells does.
MAX_CELLS = 2**20


class CapturedMethods:
    """Owner of all that captured methods read and write, but weights and pool. Owner and only caller:
    `ProgramForwards`."""

    def __init__(
        self,
        methods: Methods,
        pool: KvPool,
        *,
        prefills: Mapping[int, int],
        vocab_size: int,
        num_plans: int,
        shared_heads: int,
        max_cells: int = MAX_CELLS,
        capture: Capture | None = None,
    ) -> None:
        """`methods`, over `pool`: each decode by its width, and the prefill for each number of tokens of `prefills`,
        which ascend, giving so many rows. Each takes `num_plans` plans; `shared_heads` query heads share a key/value
        head. Capture while nothing else runs on the device; `capture` is how."""
        self._pool, self._num_plans, self._shared_heads, self._max_cells = pool, num_plans, shared_heads, max_cells
        self._rows_of = dict(prefills)
        widest = max(methods.decodes)
        self._buffers = FixedBuffers(
            most_tokens=max(widest, *prefills, 0),
            most_rows=max(widest, *prefills.values(), 0),
            table_entries=max(
                table_size(widest, max_cells),
                *(fixed_table_size(width, shared_heads, max_cells) for width in prefills), 0,
            ),
            vocab_size=vocab_size,
            device=pool.keys.device,
        )  # fmt: skip
        capture = capture or captures()
        with torch.inference_mode():
            self._prefills = {width: capture(self._prefill(methods.prefill, width)) for width in _descending(prefills)}
            self._decodes = {
                width: capture(self._decode(methods.decodes[width], width)) for width in _descending(methods.decodes)
            }

    def decode(self, rows: Rows, selector: Sequence[int]) -> Tensor | None:
        """Logits, float32 [width, vocab_size], of rows `selector` of a decode that is as wide as there are `rows`; they
        last until the next run. None, and nothing is done, where the sequences have too many cells."""
        width = len(rows.spans)
        if not self._holds(rows.spans):
            return None
        self._buffers.place(rows, selector, self._lone_table(rows, width))
        return self._decodes[width]()

    def prefill(self, rows: Rows, selector: Sequence[int]) -> Tensor | None:
        """The same of a prefill, [len(selector), vocab_size]; None also where it is too wide, or too many rows of it
        are selected."""
        num_tokens, num_rows = len(rows.tokens), len(selector)
        fits = (width for width, most in self._rows_of.items() if width >= num_tokens and most >= num_rows)
        width = next(fits, None)
        if width is None or not self._holds(rows.spans):
            return None
        self._buffers.place(rows, pad_selector(selector, self._rows_of[width]), self._chunk_table(rows.spans, width))
        return self._prefills[width]()[:num_rows]

    def _holds(self, spans: Sequence[Span]) -> bool:
        return sum(len(span.cells) for span in spans) <= self._max_cells

    def _decode(self, method: CompiledMethod, width: int) -> Forward:
        nothing = padded(Rows.nothing(), width, self._pool.scratch_cell)
        self._buffers.place(nothing, [0] * width, self._lone_table(nothing, width))
        size, layout = table_size(width, self._max_cells), layout_of(width, self._max_cells)
        return self._forward(method, width, width, self._buffers.table[:size], layout)

    def _prefill(self, method: CompiledMethod, width: int) -> Forward:
        num_rows = self._rows_of[width]
        self._buffers.place(Rows.nothing(), [0] * num_rows, self._chunk_table((), width))
        size = fixed_table_size(width, self._shared_heads, self._max_cells)
        layout = fixed_layout(width, self._shared_heads, self._max_cells)
        return self._forward(method, width, num_rows, self._buffers.table[:size], layout)

    def _lone_table(self, rows: Rows, width: int) -> Callable[[Int32Array], int]:
        return lambda host: write_lone(host, rows.spans, width)

    def _chunk_table(self, spans: Sequence[Span], width: int) -> Callable[[Int32Array], int]:
        return lambda host: write_fixed(host, spans, width, self._shared_heads, self._pool.scratch_cell)

    def _forward(self, method: CompiledMethod, width: int, num_rows: int, table: Tensor, layout: Tensor) -> Forward:
        buffers, pool = self._buffers, self._pool
        tables, layouts = ([part] * self._num_plans for part in (table, layout))
        tokens, positions, selector = buffers.tokens[:width], buffers.positions[:width], buffers.selector[:num_rows]
        logits = buffers.logits[:num_rows]

        def forward() -> Tensor:
            # Copied, so that the graphs of all widths share the memory that the method gives its logits in.
            return logits.copy_(method(tokens, positions, selector, pool.keys, pool.values, tables, layouts))

        return forward


def _descending(widths: Mapping[int, object]) -> Sequence[int]:
    """The largest first: the memory of its graph then serves all others."""
    return sorted(widths, reverse=True)

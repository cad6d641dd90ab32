"""Runs a program's compiled methods over a pool; see `worker.forwards.Forwards`.

A method is as wide as it was compiled: decodes are padded to their width with rows that write to the scratch cell, a
prefill narrower than m runs as that many decodes, and a selector shorter than the method's repeats its last row. What
padding computes nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from planner.request import TokenArray
from planner.slices import Method, decode_width, pad_selector
from worker.attention import Span
from worker.attention_op import plan_attention
from worker.batch import Batch
from worker.forwards import SelectedLogits, spans_of
from worker.kv_pool import KvPool
from worker.programs.metadata import ProgramMetadata


class CompiledMethod(Protocol):
    """One method of one width; arguments as those of `worker.programs.traced.TracedDecoder.forward`."""

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        selector: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: list[Tensor],
        layouts: list[Tensor],
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Methods:
    """All that a program has: `decodes` by width, and the prefill."""

    decodes: Mapping[int, CompiledMethod]
    prefill: CompiledMethod


def decode_ladder(metadata: ProgramMetadata, methods: Methods, widths: tuple[int, ...]) -> Mapping[int, CompiledMethod]:
    """What decodes of lone tokens run, by ascending width: the methods of just that width, and for those of `widths`
    that have none the prefill, which takes any number of tokens from m to W."""
    m, w = metadata.min_prefill_tokens, metadata.max_prefill_tokens
    by_prefill = {width: methods.prefill for width in widths if m <= width <= w}
    return dict(sorted((by_prefill | dict(methods.decodes)).items()))


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a forward that one call runs: R tokens and positions, int64, and the spans that hold them."""

    tokens: TokenArray
    positions: TokenArray
    spans: tuple[Span, ...]

    @classmethod
    def nothing(cls) -> Rows:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), ())


def padded(rows: Rows, width: int, scratch_cell: int) -> Rows:
    """Lone tokens, and as many more as `width` needs that are nobody's."""
    num_rows = len(rows.spans)
    scratch = np.array([scratch_cell], dtype=np.int32)
    idle = tuple(Span(row, 0, 1, scratch) for row in range(num_rows, width))
    zeros = np.zeros(width - num_rows, dtype=np.int64)
    return Rows(np.concatenate((rows.tokens, zeros)), np.concatenate((rows.positions, zeros)), (*rows.spans, *idle))


class Captured(Protocol):
    """Methods that were captured; see `worker.programs.captured`."""

    def decode(self, rows: Rows, selector: Sequence[int]) -> Tensor | None: ...

    def prefill(self, rows: Rows, selector: Sequence[int]) -> Tensor | None: ...


class ProgramForwards:
    """Forwards of an exported program."""

    def __init__(
        self,
        metadata: ProgramMetadata,
        pool: KvPool,
        decodes: Mapping[int, CompiledMethod],
        prefill: CompiledMethod,
        captured: Captured | None = None,
    ) -> None:
        """`decodes` by width. `pool` has the program's geometry, dtype and device, and any number of cells. `captured`:
        the same methods, captured as far as they are."""
        self._metadata = metadata
        self._pool = pool
        self._decodes = decodes
        self._widths = sorted(decodes)
        self._prefill = prefill
        self._captured = captured
        self._num_calls = 0

    @property
    def num_beats(self) -> int:
        return self._num_calls

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        rows = Rows(batch.tokens, batch.positions, tuple(spans_of(batch)))
        num_rows = len(rows.tokens)
        if method is Method.DECODE:
            return _Computed(self._decode(rows, wanted), wanted)
        if num_rows >= self._metadata.min_prefill_tokens:
            chosen = pad_selector(_some(wanted, num_rows), self._metadata.min_prefill_tokens)
            ready = None if self._captured is None else self._captured.prefill(rows, chosen)
            return _Computed(self._counted(self._prefill, rows, chosen, ready), wanted)
        # Each row sees what the rows before it wrote. What a captured decode gives lasts until the next one.
        computed = [self._decode(_one(rows, row), [0]).clone() for row in range(num_rows)]
        return _Computed(torch.cat(computed), range(num_rows))

    def _decode(self, rows: Rows, wanted: Sequence[int]) -> Tensor:
        """Lone tokens, in the narrowest decode that holds them."""
        num_rows = len(rows.tokens)
        width = decode_width(num_rows, self._widths)
        whole, chosen = padded(rows, width, self._pool.scratch_cell), pad_selector(_some(wanted, num_rows), width)
        ready = None if self._captured is None else self._captured.decode(whole, chosen)
        return self._counted(self._decodes[width], whole, chosen, ready)

    def _counted(self, method: CompiledMethod, rows: Rows, selector: Sequence[int], ready: Tensor | None) -> Tensor:
        """The logits that are `ready`, or else what the method gives."""
        self._num_calls += 1
        return self._call(method, rows, selector) if ready is None else ready

    def _call(self, method: CompiledMethod, rows: Rows, selector: Sequence[int]) -> Tensor:
        pool, device = self._pool, self._pool.keys.device
        plans = plan_attention(pool, rows.spans, self._metadata.windows, self._metadata.num_heads).values()
        return method(
            torch.from_numpy(rows.tokens).to(device),
            torch.from_numpy(rows.positions).to(device),
            torch.tensor(selector, dtype=torch.int64, device=device),
            pool.keys,
            pool.values,
            [plan.table for plan in plans],
            [plan.layout for plan in plans],
        )


class _Computed:
    """Logits that are there already; entry i is that of row `rows[i]` of the forward."""

    def __init__(self, logits: Tensor, rows: Sequence[int]) -> None:
        self._logits = logits
        self._place_of = {row: place for place, row in enumerate(rows)}

    def rows(self, rows: Sequence[int]) -> Tensor:
        places = [self._place_of[row] for row in rows]
        if places == list(range(len(places))):
            return self._logits[: len(places)]
        return self._logits.index_select(0, torch.tensor(places, device=self._logits.device))

    def normed(self, first: int, end: int) -> Tensor:
        raise RuntimeError("the compiled methods of a program give logits alone")


def _some(wanted: Sequence[int], num_rows: int) -> Sequence[int]:
    """A method computes at least one row: where nothing is wanted, its last, for nobody."""
    return wanted or [num_rows - 1]


def _one(rows: Rows, row: int) -> Rows:
    """Row `row` alone; its span ends with it."""
    span = next(span for span in rows.spans if span.row <= row < span.row + span.length)
    position = span.start + row - span.row
    lone = Span(0, position, 1, span.cells[: position + 1])
    return Rows(rows.tokens[row : row + 1], rows.positions[row : row + 1], (lone,))

"""Attention over cells in plain torch, on any device: a plan made once a forward, then a few calls a layer.

Rows of a forward are grouped so that padding stays small; a group gathers the cells it sees and attends in one call.
Cost grows with what is attended, never with the pool, and no layer loops over sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from planner.request import CellArray
from worker.kv_pool import KvPool

# Most (query, cell) pairs of a group, which bounds its mask. A longer span is cut by queries.
_MAX_PAIRS = 1 << 19
# Most gathered cells of one group, which bounds the copies of keys and values.
_MAX_GATHERED_CELLS = 1 << 16
# A group may do this many times the work that its spans need.
_MAX_PADDING = 1.4


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence in a forward.

    Rows [row, row + length) of the forward are positions [start, start + length); `cells` int32[start + length].
    """

    row: int
    start: int
    length: int
    cells: CellArray


@dataclass(frozen=True, slots=True)
class Group:
    """Spans that attend in one call. S spans, Q queries and C cells each, padded to the largest.

    `rows` int64[S * Q]: rows of the forward (padding repeats one). `cells` int64[S * C]: what they see (padding is
    the scratch cell). `mask` bool[S, 1, 1, Q, C], true = attend; None where all is seen. `back` int64: which of
    the S * Q rows of the result are real, in the order of `rows_back`, int64: their rows of the forward.
    """

    num_spans: int
    rows: Tensor
    cells: Tensor
    mask: Tensor | None
    back: Tensor | None
    rows_back: Tensor


class TorchAttention:
    """Keys, values and visibility of one forward; see `worker.models.decoder.Attention`. The oracle of all others."""

    def __init__(
        self,
        pool: KvPool,
        spans: Sequence[Span],
        windows: Sequence[int | None],
    ) -> None:
        """`spans` cover the forward's rows in order; `windows` has one entry a layer."""
        self._pool = pool
        self._windows = windows
        device = pool.keys.device
        written = np.concatenate([span.cells[span.start :] for span in spans])
        self._written = torch.from_numpy(written.astype(np.int64)).to(device)
        self._groups = {window: make_groups(spans, window, pool.scratch_cell, device) for window in set(windows)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._pool.write(layer, self._written, key, value)
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        groups = self._groups[self._windows[layer]]
        mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for group in groups:
            attend_group(query, keys, values, group, mixed)
        return mixed


def attend_group(query: Tensor, keys: Tensor, values: Tensor, group: Group, mixed: Tensor) -> None:
    """Fill the group's rows of `mixed` [T, H, D], for `query` [T, H, D] over `keys`, `values` [cells, J, D]."""
    part = _attend(query.index_select(0, group.rows), keys, values, group)
    mixed.index_copy_(0, group.rows_back, part if group.back is None else part.index_select(0, group.back))


def _attend(query: Tensor, keys: Tensor, values: Tensor, group: Group) -> Tensor:
    """`query` [S * Q, H, D] over the pool's `keys`, `values` [cells, J, D]; returns [S * Q, H, D].

    The H / J query heads of a key/value head become rows of one matrix, so that K and V are not repeated.
    """
    num_kv_heads, head_dim = keys.shape[1:]
    num_rows, num_heads, _ = query.shape
    num_spans, shared = group.num_spans, num_heads // num_kv_heads
    num_queries = num_rows // num_spans
    key_sjcd = keys.index_select(0, group.cells).view(num_spans, -1, num_kv_heads, head_dim).transpose(1, 2)
    value_sjcd = values.index_select(0, group.cells).view(num_spans, -1, num_kv_heads, head_dim).transpose(1, 2)
    query_sjrd = (
        query.view(num_spans, num_queries, num_kv_heads, shared, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(num_spans, num_kv_heads, shared * num_queries, head_dim)
    )
    mask = group.mask
    if mask is not None:
        mask = mask.expand(-1, -1, shared, -1, -1).reshape(num_spans, 1, shared * num_queries, -1)
    mixed = functional.scaled_dot_product_attention(query_sjrd, key_sjcd, value_sjcd, attn_mask=mask)
    return (
        mixed.view(num_spans, num_kv_heads, shared, num_queries, head_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(num_rows, num_heads, head_dim)
    )


def make_groups(spans: Sequence[Span], window: int | None, scratch_cell: int, device: torch.device) -> list[Group]:
    """Cut long spans, sort by size, and pack neighbours while padding stays within bounds."""
    cut = [piece for span in spans for piece in _cut(span)]
    seen = sorted(((span, _first_seen(span, window)) for span in cut), key=lambda pair: _size(*pair), reverse=True)
    groups: list[list[tuple[Span, int]]] = []
    work = 0
    for span, first in seen:
        queries, cells = _size(span, first)
        if groups:
            most_queries = groups[-1][0][0].length
            most_cells = max(_size(*pair)[1] for pair in (groups[-1][0], (span, first)))
            num_spans = len(groups[-1]) + 1
            padded = num_spans * most_queries * most_cells
            if (
                padded <= min(_MAX_PADDING * (work + queries * cells), _MAX_PAIRS)
                and num_spans * most_cells <= _MAX_GATHERED_CELLS
            ):
                groups[-1].append((span, first))
                work += queries * cells
                continue
        groups.append([(span, first)])
        work = queries * cells
    return [_group(members, window, scratch_cell, device) for members in groups]


def _cut(span: Span) -> Iterable[Span]:
    most_queries = max(1, _MAX_PAIRS // (span.start + span.length))
    for offset in range(0, span.length, most_queries):
        length = min(most_queries, span.length - offset)
        start = span.start + offset
        yield Span(span.row + offset, start, length, span.cells[: start + length])


def _first_seen(span: Span, window: int | None) -> int:
    return 0 if window is None else max(0, span.start - window + 1)


def _size(span: Span, first: int) -> tuple[int, int]:
    return span.length, span.start + span.length - first


def _group(members: Sequence[tuple[Span, int]], window: int | None, scratch_cell: int, device: torch.device) -> Group:
    num_spans = len(members)
    num_queries = max(span.length for span, _ in members)
    num_cells = max(_size(*pair)[1] for pair in members)
    cells = np.full((num_spans, num_cells), scratch_cell, dtype=np.int64)
    for row, (span, first) in zip(cells, members, strict=True):
        row[: len(span.cells) - first] = span.cells[first:]
    first_rows, starts, lengths = (
        np.array([getattr(span, name) for span, _ in members])[:, None] for name in ("row", "start", "length")
    )
    firsts = np.array([first for _, first in members])[:, None]
    query = np.arange(num_queries)[None, :]
    real = query < lengths
    # A padded query repeats the span's last one, so that it sees something and stays finite.
    query = np.minimum(query, lengths - 1)
    rows = first_rows + query
    query_positions, cell_positions = (starts + query)[:, :, None], (firsts + np.arange(num_cells)[None, :])[:, None, :]
    visible = cell_positions <= query_positions
    if window is not None:
        visible &= cell_positions > query_positions - window
    return Group(
        num_spans=num_spans,
        rows=_tensor(rows.ravel(), device),
        cells=_tensor(cells.ravel(), device),
        mask=None if visible.all() else _tensor(visible[:, None, None], device),
        back=None if real.all() else _tensor(np.flatnonzero(real), device),
        rows_back=_tensor(rows[real], device),
    )


def _tensor(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)

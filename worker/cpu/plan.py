"""Who sees which cells in one forward on the CPU, for the layers of one window; and that plan as two plain tensors.

A program's methods take tensors only, so the plan travels through them as a table of integers, and the operator of each
layer (`worker.attention_op`) reads it again without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.attention import Group, Span, make_groups
from worker.packed_plan import PackedPlan

Integers = npt.NDArray[np.int64]

_CPU = torch.device("cpu")
_WORD_BYTES = 8
# Sections of the table before those of groups: written cells, and the four arrays of lone tokens.
_NUM_FIRST_SECTIONS = 5
# Entries of the layout for each group: how many spans it has, and the sizes of its five sections.
_GROUP_ENTRIES = 6


@dataclass(frozen=True, slots=True)
class LoneTokens:
    """Spans of one token: span i sits in row `rows[i]` and sees `cells[firsts[i] : ends[i]]`; all int64."""

    rows: Integers
    cells: Integers
    firsts: Integers
    ends: Integers


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """`written` int64[T]: the cell of each row. Rows are attended either by the kernel for lone tokens or in groups."""

    written: Tensor
    lone: LoneTokens
    groups: tuple[Group, ...]


def plan_for_cpu(spans: Sequence[Span], window: int | None, scratch_cell: int, *, lone_kernel: bool) -> PackedPlan:
    """Plan a forward whose rows `spans` cover in order. `lone_kernel`: whether lone tokens are left to the kernel."""
    lone = [span for span in spans if lone_kernel and span.length == 1]
    grouped = [span for span in spans if not (lone_kernel and span.length == 1)]
    written = np.concatenate([span.cells[span.start :] for span in spans]).astype(np.int64)
    groups = make_groups(grouped, window, scratch_cell, _CPU)
    lone_tokens = _lone_tokens(lone, window)
    sections = [written, lone_tokens.rows, lone_tokens.cells, lone_tokens.firsts, lone_tokens.ends]
    layout = [len(section) for section in sections]
    for group in groups:
        parts = list(_sections(group))
        layout += [group.num_spans, *(len(part) for part in parts)]
        sections += parts
    return PackedPlan(torch.from_numpy(np.concatenate(sections)), torch.tensor(layout))


def unpack(packed: PackedPlan) -> CpuPlan:
    """The plan, as views of the table."""
    layout: list[int] = packed.layout.tolist()
    entries = layout[_NUM_FIRST_SECTIONS:]
    per_group = [entries[at : at + _GROUP_ENTRIES] for at in range(0, len(entries), _GROUP_ENTRIES)]
    sizes = layout[:_NUM_FIRST_SECTIONS] + [size for _, *group_sizes in per_group for size in group_sizes]
    written, *views = torch.split(packed.table, sizes)
    lone = LoneTokens(*(view.numpy() for view in views[: _NUM_FIRST_SECTIONS - 1]))
    of_groups = iter(views[_NUM_FIRST_SECTIONS - 1 :])
    return CpuPlan(written, lone, tuple(_group(num_spans, of_groups) for num_spans, *_ in per_group))


def _sections(group: Group) -> Iterator[Integers]:
    nothing = np.empty(0, dtype=np.int64)
    yield group.rows.numpy()
    yield group.cells.numpy()
    yield nothing if group.mask is None else _words(group.mask)
    yield nothing if group.back is None else group.back.numpy()
    yield group.rows_back.numpy()


def _group(num_spans: int, views: Iterator[Tensor]) -> Group:
    rows, cells, mask, back, rows_back = (next(views) for _ in range(_GROUP_ENTRIES - 1))
    num_queries, num_cells = len(rows) // num_spans, len(cells) // num_spans
    return Group(
        num_spans=num_spans,
        rows=rows,
        cells=cells,
        mask=_mask(mask, (num_spans, 1, 1, num_queries, num_cells)) if len(mask) else None,
        back=back if len(back) else None,
        rows_back=rows_back,
    )


def _words(mask: Tensor) -> Integers:
    """The mask's bytes in whole words."""
    padded = np.zeros(-(-mask.numel() // _WORD_BYTES) * _WORD_BYTES, dtype=np.bool_)
    padded[: mask.numel()] = mask.numpy().ravel()
    return padded.view(np.int64)


def _mask(words: Tensor, shape: tuple[int, ...]) -> Tensor:
    num_entries = int(np.prod(shape))
    return words.view(torch.bool)[:num_entries].view(shape)


def _lone_tokens(spans: Sequence[Span], window: int | None) -> LoneTokens:
    lengths = np.array([len(span.cells) for span in spans], dtype=np.int64)
    ends = np.cumsum(lengths)
    cells = [span.cells.astype(np.int64) for span in spans]
    return LoneTokens(
        rows=np.array([span.row for span in spans], dtype=np.int64),
        cells=np.concatenate(cells) if cells else np.empty(0, dtype=np.int64),
        firsts=ends - (lengths if window is None else np.minimum(lengths, window)),
        ends=ends,
    )

"""A prefill's plan at fixed places: sizes, and so launches, follow from a number of tokens alone.

For captured forwards, which hold addresses and launch grids. There is room for as many chunks and tiles as tokens may
make; what a forward does not use says that it is nothing, and padding goes to the scratch cell. Cells come last,
so that what is used is one run of entries, uploaded by one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.attention import Span
from worker.cuda.launch import aligned
from worker.cuda.prefill_plan import (
    LONG_ROWS,
    SHORT_ROWS,
    WIDE_ROWS,
    Int32Array,
    PrefillPlan,
    plan_parts,
    unpack_prefill,
)
from worker.packed_plan import PackedPlan

# Every part starts at a multiple of 16 bytes, as `prefill_plan` lays them out, too.
_ALIGNED = 4
_NO_CHUNK = -1


def fixed_table_size(width: int, shared_heads: int, max_cells: int) -> int:
    """Entries of the table of so many tokens, whose sequences have at most `max_cells` cells together."""
    return sum(_sizes(width, shared_heads)) + max_cells


def fixed_layout(width: int, shared_heads: int, max_cells: int) -> Tensor:
    """Where everything lies in such a table: the layout of a `PackedPlan`; on the CPU."""
    return torch.tensor([*_sizes(width, shared_heads), max_cells])


def fixed_plan(table: Tensor, width: int, shared_heads: int, max_cells: int) -> PrefillPlan:
    """The plan of `width` tokens, as views of the first entries of `table`, which may be longer."""
    whole = table[: fixed_table_size(width, shared_heads, max_cells)]
    return unpack_prefill(PackedPlan(whole, fixed_layout(width, shared_heads, max_cells)), shared_heads)


def write_fixed(host: Int32Array, spans: Sequence[Span], width: int, shared_heads: int, scratch_cell: int) -> int:
    """Write the plan of `spans`, which have at most `width` tokens, into `host`, and return how many of its entries
    mean something now: all that follow are cells that nobody reads."""
    sizes = _sizes(width, shared_heads)
    unused = (0, 0, scratch_cell, _NO_CHUNK, _NO_CHUNK, _NO_CHUNK)
    *parts, cells = plan_parts(spans, shared_heads) if spans else [np.empty(0, np.int32)] * (len(sizes) + 1)
    begin = 0
    for part, size, filler in zip(parts, sizes, unused, strict=True):
        host[begin : begin + part.size] = part.ravel()
        host[begin + part.size : begin + size] = filler
        begin += size
    host[begin : begin + len(cells)] = cells
    return begin + len(cells)


def _sizes(width: int, shared_heads: int) -> list[int]:
    """Entries of the parts of so many tokens, but cells: chunks, positions, new cells, and wide, long and short tiles.
    Of each kind as many tiles as there may be: a chunk's last one need not be full."""
    assert width % _ALIGNED == 0, "a part has as many entries as it is aligned to"
    rows, least = width * shared_heads, SHORT_ROWS + 1
    wide = rows * 3 // (2 * WIDE_ROWS)  # rows / WIDE_ROWS, and one more for each chunk of 2 WIDE_ROWS
    long = rows * (LONG_ROWS + least) // (LONG_ROWS * least)  # likewise
    entries = (4 * width, width, width, 2 * wide, 2 * long, 2 * width)
    return [aligned(size, _ALIGNED) for size in entries]

"""Cuts a step's attention into pieces of about equal size, on the device, from how long the sequences are now.

A captured grid knows neither lengths nor how many rows are padding; with a fixed number of programs a row, the longest
row keeps its multiprocessor busy when the others have ended. So the kernel that starts a step lists pieces of work,
and a program of attention takes the piece of its number. It is the even cut of Stream-K (Osama et al. 2023) with
pieces that keep to one row, so that a row of one piece needs no sum over pieces.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

from worker.cuda.decode_plan import ITEM_WORDS

# Pieces that one program writes at a time.
_LANES = tl.constexpr(32)
_WORDS = tl.constexpr(ITEM_WORDS)


@triton.jit
def list_pieces(
    row, row_slots, length, new_cell, num_rows, scratch_slot, longest, work, num_pieces,
    ROWS: tl.constexpr, PIECES: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Row `row`'s pieces into work [PIECES + num_rows, ITEM_WORDS]; row 0 writes how many there are of all rows.

    Every row counts `min(position, longest)` cells; all of them together make about PIECES pieces, each of at least
    SHARE cells, a multiple of 16, but for what ends a row. A padding row has none. Rows of large pieces come first, so
    that the last programs to start are short ones (Graham 1969).
    """
    lanes = tl.arange(0, ROWS)
    slots = tl.load(row_slots + lanes, mask=lanes < num_rows, other=scratch_slot)
    real = slots != scratch_slot
    cells = tl.minimum(tl.load(length + slots, mask=real, other=0), longest)
    share = tl.maximum(tl.cdiv(tl.cdiv(tl.sum(cells, axis=0), PIECES), 16) * 16, SHARE)
    counts = tl.where(real, tl.maximum(tl.cdiv(cells, share), 1), 0)
    if row == 0:
        tl.store(num_pieces, tl.sum(counts, axis=0))
    sizes = tl.cdiv(cells, tl.maximum(counts, 1))
    own = tl.sum(tl.where(lanes == row, sizes, 0), axis=0)
    sooner = (sizes > own) | ((sizes == own) & (lanes < row))
    first = tl.sum(tl.where(sooner, counts, 0), axis=0)
    count = tl.sum(tl.where(lanes == row, counts, 0), axis=0)
    slot = tl.load(row_slots + row)
    position = tl.load(length + slot)
    for begin in range(0, count, _LANES):
        piece = begin + tl.arange(0, _LANES)
        at = work + (first + piece) * _WORDS
        mine = piece < count
        tl.store(at, row + piece * 0, mask=mine)
        tl.store(at + 1, slot + piece * 0, mask=mine)
        tl.store(at + 2, position + piece * 0, mask=mine)
        tl.store(at + 3, new_cell + piece * 0, mask=mine)
        tl.store(at + 4, first + piece * 0, mask=mine)
        tl.store(at + 5, count + piece * 0, mask=mine)
        tl.store(at + 6, piece, mask=mine)

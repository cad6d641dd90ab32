"""Which cells each row of a forward sees, as one flat table for compiled code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker.batch import Batch

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SeenCells:
    """In layers of window w row t sees `cells[firsts[w][t] : ends[t]]`, the last of them its own; all int64."""

    cells: Integers
    firsts: dict[int | None, Integers]
    ends: Integers


def seen_cells(batch: Batch, windows: Iterable[int | None]) -> SeenCells:
    """Of every window that there is; rows of one piece share its cells."""
    cells = [piece.chunk.cells[: piece.start + piece.length] for piece in batch.pieces]
    begins = np.cumsum([0, *(len(of_piece) for of_piece in cells[:-1])])
    begins_of_rows = np.repeat(begins, [piece.length for piece in batch.pieces])
    ends = begins_of_rows + batch.positions + 1
    firsts = {
        window: begins_of_rows if window is None else np.maximum(begins_of_rows, ends - window)
        for window in set(windows)
    }
    return SeenCells(np.concatenate(cells).astype(np.int64), firsts, ends)

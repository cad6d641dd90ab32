"""What a GPU prefill forward reads besides weights, activations and cells: one small table of integers, copied once.

Made on the host for each forward, used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker.attention import Span
from worker.cuda.launch import aligned
from worker.packed_plan import PackedPlan
from worker.sampler import Upload

# Rows (a token's query heads of one group count as rows) of a tile. Short chunks take tiles of the least that a
# matrix instruction takes; wide tiles read K and V half as often as long ones, where a chunk fills several.
WIDE_ROWS = 256
LONG_ROWS = 128
SHORT_ROWS = 16
# Every table starts at a multiple of 16 bytes.
_ALIGNED = 4
_CHUNK_ENTRIES = 4
_TILE_ENTRIES = 2

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """The chunks of one forward, on the device; C chunks, T tokens, all int32.

    * `chunks` [C, 4]: first packed row, length, start position, first entry in `cells`.
    * `positions` [T] and `new_cells` [T]: of each packed token.
    * `wide_tiles`, `long_tiles`, `short_tiles` [n, 2]: chunk, first row in it. Those that attend most come
      first, so that the last programs to start are short ones.
    * `cells`: the chunks' cell lists end to end, from position 0 on.
    """

    num_tokens: int
    shared_heads: int
    chunks: Tensor
    positions: Tensor
    new_cells: Tensor
    wide_tiles: Tensor
    long_tiles: Tensor
    short_tiles: Tensor
    cells: Tensor


def plan_prefill(
    spans: Sequence[Span], shared_heads: int, device: torch.device, upload: Upload | None = None
) -> PrefillPlan:
    """Lay out `spans`, which cover the forward's rows in order; `shared_heads` query heads share a key/value head.
    `upload` brings the plan to `device`; None: by memory that is pinned for it."""
    return unpack_prefill(pack_prefill(spans, shared_heads, device, upload), shared_heads)


def pack_prefill(
    spans: Sequence[Span], shared_heads: int, device: torch.device, upload: Upload | None = None
) -> PackedPlan:
    """The same plan as one table (int32, on `device`) and the number of entries of each of its tensors."""
    parts = plan_parts(spans, shared_heads)
    sizes = [part.size for part in parts]
    room = _aligned(sizes)
    pinned = device.type == "cuda" and upload is None
    flat = torch.zeros(sum(room), dtype=torch.int32, pin_memory=pinned)
    for part, view in zip(parts, torch.split(flat, room), strict=True):
        view.numpy()[: part.size] = part.ravel()
    table = flat.to(device, non_blocking=True) if upload is None else upload(flat.numpy())
    return PackedPlan(table, torch.tensor(sizes))


def plan_parts(spans: Sequence[Span], shared_heads: int) -> tuple[Int32Array, ...]:
    """The plan's arrays in the order of `PrefillPlan`, on the host."""
    lengths = np.array([span.length for span in spans])
    starts = np.array([span.start for span in spans])
    offsets = np.concatenate(([0], np.cumsum(starts + lengths)[:-1]))
    chunks = np.stack(([span.row for span in spans], lengths, starts, offsets), axis=1).astype(np.int32)
    rows = lengths * shared_heads
    is_short, is_wide = rows <= SHORT_ROWS, rows >= 2 * WIDE_ROWS
    return (
        chunks,
        np.concatenate([np.arange(s.start, s.start + s.length) for s in spans]).astype(np.int32),
        np.concatenate([span.cells[span.start :] for span in spans]).astype(np.int32),
        _tiles(chunks, is_wide, shared_heads, WIDE_ROWS),
        _tiles(chunks, ~(is_short | is_wide), shared_heads, LONG_ROWS),
        _tiles(chunks, is_short, shared_heads, SHORT_ROWS),
        np.concatenate([span.cells for span in spans]).astype(np.int32),
    )


def unpack_prefill(packed: PackedPlan, shared_heads: int) -> PrefillPlan:
    """The plan, as views of the table. Does not wait for the device."""
    sizes: list[int] = packed.layout.tolist()
    views = [view[:size] for view, size in zip(torch.split(packed.table, _aligned(sizes)), sizes, strict=True)]
    chunks, positions, new_cells, wide_tiles, long_tiles, short_tiles, cells = views
    return PrefillPlan(
        num_tokens=len(positions),
        shared_heads=shared_heads,
        chunks=chunks.view(-1, _CHUNK_ENTRIES),
        positions=positions,
        new_cells=new_cells,
        wide_tiles=wide_tiles.view(-1, _TILE_ENTRIES),
        long_tiles=long_tiles.view(-1, _TILE_ENTRIES),
        short_tiles=short_tiles.view(-1, _TILE_ENTRIES),
        cells=cells,
    )


def _aligned(sizes: Sequence[int]) -> list[int]:
    return [aligned(size, _ALIGNED) for size in sizes]


def _tiles(chunks: Int32Array, chosen: npt.NDArray[np.bool_], shared_heads: int, tile_rows: int) -> Int32Array:
    """Tiles of the chosen chunks, int32[n, 2], those that attend most first."""
    indices = np.flatnonzero(chosen)
    rows = chunks[indices, 1] * shared_heads
    counts = -(-rows // tile_rows)
    chunk = np.repeat(indices, counts)
    first_row = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_rows
    num_seen = chunks[chunk, 2] + (first_row + tile_rows) // shared_heads
    order = np.argsort(-num_seen, kind="stable")
    return np.stack((chunk, first_row), axis=1)[order].astype(np.int32)

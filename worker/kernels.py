# mypy: allow-untyped-calls, disable-error-code="attr-defined"
"""Moves cells of all layers at once: within the pool, out to a packed buffer, and back from one.

numba.cuda kernels on torch's current stream, so a captured CUDA graph may hold them. They move words and know no dtype.
Without a GPU they run in numba's simulator, on host memory (`worker.cuda.device_words`). Not here: the way to host
memory (`worker.swap`), and which cells move (the planner's business).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numba import cuda
from torch import Tensor

from worker.cuda.device_words import SIMULATED, current_stream, load_wide, memory_view, store_wide, tensor_view

# Widest first. A 16-byte word is a pair of 8-byte ones, moved by one instruction.
_WORD_BYTES = (16, 8, 4, 2, 1)
_VIEWS = {16: np.uint64, 8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
_THREADS = 256


class CellCopier:
    """Copies cells of one pool. Owner: whoever owns the pool; all calls from its thread.

    `planes` are K and V of every layer, `[num_cells, num_kv_heads, head_dim]` each, alike and contiguous; they may be
    separate allocations. They must stay where they are: addresses are taken once, since taking them again costs
    several times a launch. Cell lists are int32[n], on the pool's device or in pinned host memory, n <= num_cells; an
    index outside the pool is the caller's error and is checked only where it costs nothing, on the host. All calls are
    of one stream: a list is copied to a fixed place that the next call writes again.
    """

    def __init__(self, planes: Sequence[Tensor]) -> None:
        assert planes, "a pool has at least one plane"
        first = planes[0]
        assert all(p.shape == first.shape and p.dtype == first.dtype and p.is_contiguous() for p in planes)
        self.num_planes = len(planes)
        self.num_cells = first.shape[0]
        self.row_bytes = first[0].numel() * first.element_size()
        self.device = first.device
        # The views below hold addresses, not memory: this keeps the memory.
        self._planes = tuple(planes)
        addresses = [plane.data_ptr() for plane in planes]
        base, end = min(addresses), max(addresses) + self.num_cells * self.row_bytes
        self._word_bytes = widest_word(self.row_bytes, *addresses)
        self._row_words = self.row_bytes // self._word_bytes
        # One view spans all planes, whatever else lies between them; only the planes themselves are touched.
        self._pool = _view(base, end - base, self._word_bytes)
        starts = [(address - base) // self._word_bytes for address in addresses]
        self._starts = _Viewed(torch.tensor(starts, dtype=torch.int64, device=self.device))
        # Lists are copied here first, which costs a fraction of a new view.
        self._sources, self._targets = (
            _Viewed(torch.zeros(self.num_cells, dtype=torch.int32, device=self.device)) for _ in range(2)
        )

    def buffer(self, num_cells: int) -> PackedCells:
        """A new buffer for up to `num_cells` cells, on the pool's device."""
        size = self.num_planes * num_cells * self.row_bytes
        return self.packed(torch.empty(size, dtype=torch.uint8, device=self.device))

    def packed(self, storage: Tensor) -> PackedCells:
        """Let `storage` uint8[bytes], on the pool's device and 16-byte aligned, hold cells."""
        assert storage.dtype == torch.uint8
        assert storage.is_contiguous()
        assert storage.data_ptr() % self._word_bytes == 0
        capacity = storage.numel() // (self.num_planes * self.row_bytes)
        return PackedCells(storage, capacity, _view(storage.data_ptr(), storage.numel(), self._word_bytes))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Cell `target[i]` becomes a copy of cell `source[i]`. No cell is in both lists, none twice in `target`."""
        assert len(source) == len(target)
        self._put(target, self._targets)
        self._launch(_kernels(self._wide).copy, source, self._targets.view, len(source))

    def gather(self, cells: Tensor, packed: PackedCells, block_cells: int | None = None) -> None:
        """Fill `packed`, read as `[num_planes, n, row_bytes]`, with `cells`; or as one such block after the other, of
        `block_cells` cells each but the last."""
        assert len(cells) <= packed.capacity
        self._launch(_kernels(self._wide).gather, cells, packed.words, block_cells or len(cells))

    def scatter(self, packed: PackedCells, cells: Tensor, block_cells: int | None = None) -> None:
        """The way back of `gather`: the same number of cells, none twice, in the same blocks."""
        assert len(cells) <= packed.capacity
        self._launch(_kernels(self._wide).scatter, cells, packed.words, block_cells or len(cells))

    @property
    def _wide(self) -> bool:
        return self._word_bytes == 16

    def _put(self, cells: Tensor, into: _Viewed) -> None:
        assert cells.dtype == torch.int32
        assert len(cells) <= self.num_cells
        if cells.device.type == "cpu" and len(cells):
            assert int(cells.min()) >= 0
            assert int(cells.max()) < self.num_cells
        into.tensor[: len(cells)].copy_(cells, non_blocking=True)

    def _launch(self, kernel: Any, cells: Tensor, other: Any, block_cells: int) -> None:
        num_cells = len(cells)
        if num_cells == 0:
            return
        self._put(cells, self._sources)
        # A thread has four words in flight, so a quarter of a row's words is enough lanes.
        lanes = min(32, 1 << math.ceil(math.log2(max(1, self._row_words / 4))))
        rows = _THREADS // lanes if not SIMULATED else 2
        grid = (math.ceil(num_cells / rows), self.num_planes)
        kernel[grid, (lanes, rows), current_stream()](
            self._pool, self._starts.view, self._sources.view, other, num_cells, self._row_words, block_cells
        )


class _Viewed:
    """A tensor, and the view that kernels use of it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.view = tensor_view(tensor)


@dataclass(frozen=True, slots=True)
class PackedCells:
    """Storage for cells of all planes, back to back, with the view that kernels use of it."""

    storage: Tensor
    capacity: int
    words: Any


def widest_word(*sizes: int) -> int:
    """Bytes of the widest word that divides all `sizes`: row bytes and addresses."""
    return next(width for width in _WORD_BYTES if all(size % width == 0 for size in sizes))


@dataclass(frozen=True, slots=True)
class _Kernels:
    copy: Any
    gather: Any
    scatter: Any


@functools.cache
def _kernels(wide: bool) -> _Kernels:
    """The three kernels for words of 16 bytes, or of what the views hold; compiled at their first launch."""
    step = 2 if wide else 1
    copy_row = cuda.jit(device=True)(_copy_row_wide if wide else _copy_row)

    def packed_row(i: int, num_cells: int, block_cells: int) -> Any:
        """Where a plane's row of the i-th cell lies, in rows: behind the blocks before its own, and in its own block
        behind the planes before this one."""
        first = i // block_cells * block_cells
        return first * cuda.gridDim.y + cuda.blockIdx.y * min(block_cells, num_cells - first) + i - first

    packed_row = cuda.jit(device=True)(packed_row)

    def copy(
        pool: Any, starts: Any, sources: Any, targets: Any, num_cells: int, row_words: int, block_cells: int
    ) -> None:
        i = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        if i < num_cells:
            start = starts[cuda.blockIdx.y]
            source = start + np.int64(sources[i]) * row_words
            target = start + np.int64(targets[i]) * row_words
            copy_row(pool, target * step, pool, source * step, row_words)

    def gather(
        pool: Any, starts: Any, cells: Any, packed: Any, num_cells: int, row_words: int, block_cells: int
    ) -> None:
        i = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        if i < num_cells:
            source = starts[cuda.blockIdx.y] + np.int64(cells[i]) * row_words
            target = np.int64(packed_row(i, num_cells, block_cells)) * row_words
            copy_row(packed, target * step, pool, source * step, row_words)

    def scatter(
        pool: Any, starts: Any, cells: Any, packed: Any, num_cells: int, row_words: int, block_cells: int
    ) -> None:
        i = cuda.blockIdx.x * cuda.blockDim.y + cuda.threadIdx.y
        if i < num_cells:
            source = np.int64(packed_row(i, num_cells, block_cells)) * row_words
            target = starts[cuda.blockIdx.y] + np.int64(cells[i]) * row_words
            copy_row(pool, target * step, packed, source * step, row_words)

    jit = cast("Callable[[object], Any]", cuda.jit)
    return _Kernels(jit(copy), jit(gather), jit(scatter))


def _copy_row(target: Any, target_start: int, source: Any, source_start: int, row_words: int) -> None:
    """Lanes of one row move every lanes-th word; four loads are in flight before the first store."""
    lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
    word = lane
    while word + 3 * lanes < row_words:
        a = source[source_start + word]
        b = source[source_start + word + lanes]
        c = source[source_start + word + 2 * lanes]
        d = source[source_start + word + 3 * lanes]
        target[target_start + word] = a
        target[target_start + word + lanes] = b
        target[target_start + word + 2 * lanes] = c
        target[target_start + word + 3 * lanes] = d
        word += 4 * lanes
    while word < row_words:
        target[target_start + word] = source[source_start + word]
        word += lanes


def _copy_row_wide(target: Any, target_start: int, source: Any, source_start: int, row_words: int) -> None:
    """The same for 16-byte words, each two elements of the views."""
    lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
    word = lane
    while word + 3 * lanes < row_words:
        a = load_wide(source, source_start + 2 * word)
        b = load_wide(source, source_start + 2 * (word + lanes))
        c = load_wide(source, source_start + 2 * (word + 2 * lanes))
        d = load_wide(source, source_start + 2 * (word + 3 * lanes))
        store_wide(target, target_start + 2 * word, a)
        store_wide(target, target_start + 2 * (word + lanes), b)
        store_wide(target, target_start + 2 * (word + 2 * lanes), c)
        store_wide(target, target_start + 2 * (word + 3 * lanes), d)
        word += 4 * lanes
    while word < row_words:
        store_wide(target, target_start + 2 * word, load_wide(source, source_start + 2 * word))
        word += lanes


def _view(address: int, num_bytes: int, word_bytes: int) -> Any:
    dtype = np.dtype(_VIEWS[word_bytes])
    return memory_view(address, num_bytes // dtype.itemsize, dtype)

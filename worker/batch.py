"""One forward's share of a step: which rows of which chunks it runs, and which rows are wanted. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.request import Pooling, TokenArray
from planner.slices import Method, Slice, pad_selector
from planner.step import Chunk


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [row, row + length) of a forward: tokens [offset, offset + length) of the step's chunk `index`."""

    index: int
    chunk: Chunk
    row: int
    offset: int
    length: int

    @property
    def start(self) -> int:
        """Position of the first token."""
        return self.chunk.start + self.offset

    @property
    def ends_chunk(self) -> bool:
        return self.offset + self.length == self.chunk.length

    @property
    def sampled_row(self) -> int | None:
        return self.row + self.length - 1 if self.chunk.samples and self.ends_chunk else None

    @property
    def pooled_rows(self) -> range:
        """Rows whose hidden states make up the chunk's share of a vector."""
        end = self.row + self.length
        if self.chunk.pooling is Pooling.MEAN:
            return range(self.row, end)
        return range(end - 1, end) if self.chunk.pooling is Pooling.LAST and self.ends_chunk else range(0)

    @property
    def target_rows(self) -> range:
        """Rows whose `targets` are to be given log probabilities."""
        return range(self.row, self.row + len(self.targets))

    @property
    def targets(self) -> TokenArray:
        everything = self.chunk.prompt_targets
        if everything is None:
            return np.empty(0, dtype=np.int64)
        return everything[self.offset : self.offset + self.length]


@dataclass(frozen=True, slots=True)
class Batch:
    """Pieces laid end to end: T rows, `tokens` and `positions` int64[T]. A token that only the device knows is 0."""

    pieces: tuple[Piece, ...]
    tokens: TokenArray
    positions: TokenArray


def cut(chunks: Sequence[Chunk], piece_of: Slice, wanted: Callable[[int], bool]) -> Batch | None:
    """The batch of one slice, without the chunks (by index) that are not `wanted`; None if nothing is left."""
    pieces = tuple(_pieces(chunks, piece_of, wanted))
    if not pieces:
        return None
    tokens = np.concatenate([_tokens(p.chunk)[p.offset : p.offset + p.length] for p in pieces])
    positions = np.concatenate([np.arange(p.start, p.start + p.length, dtype=np.int64) for p in pieces])
    return Batch(pieces, tokens.astype(np.int64, copy=False), positions)


def selector(rows: Sequence[int], method: Method, min_prefill_tokens: int) -> list[int]:
    """The rows whose logits a forward computes: a prefill gives at least m, repeating the last; nobody reads those."""
    if not rows or method is Method.DECODE:
        return list(rows)
    return list(pad_selector(rows, min_prefill_tokens))


def _pieces(chunks: Sequence[Chunk], piece_of: Slice, wanted: Callable[[int], bool]) -> Iterator[Piece]:
    chunk_start, row = 0, 0
    for index, chunk in enumerate(chunks):
        first = max(piece_of.offset, chunk_start)
        end = min(piece_of.offset + piece_of.length, chunk_start + chunk.length)
        if first < end and wanted(index):
            yield Piece(index, chunk, row, first - chunk_start, end - first)
            row += end - first
        chunk_start += chunk.length


def _tokens(chunk: Chunk) -> TokenArray:
    return np.zeros(chunk.length, dtype=np.int64) if chunk.tokens is None else chunk.tokens

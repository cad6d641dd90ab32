"""The seam between an executor and what runs one forward: an eager decoder here, an exported program elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from planner.slices import Method
from worker.attention import Span
from worker.attention_op import attention_of
from worker.batch import Batch
from worker.kv_pool import KvPool
from worker.lora import LoraSlots
from worker.models.decoder import Attention, Decoder

MakeAttention = Callable[[KvPool, Sequence[Span], Sequence[int | None], int], Attention]
"""From the pool, the forward's spans, one window a layer and the number of query heads."""


class SelectedLogits(Protocol):
    """What one forward gave."""

    def rows(self, rows: Sequence[int]) -> Tensor:
        """float32[len(rows), vocab_size] of rows of the forward, each of which was among those wanted."""
        ...

    def normed(self, first: int, end: int) -> Tensor:
        """[end - first, E], whether wanted or not: the rows behind the last norm.

        Raises `RuntimeError` where the program keeps them to itself, which then has no `vector_size`."""
        ...


class Forwards(Protocol):
    """Runs forwards over one pool. Owner and only caller: the executor, in torch's inference mode."""

    @property
    def num_beats(self) -> int:
        """Grows while a forward gets on; read on any thread."""
        ...

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        """Write keys and values of the batch's tokens to their cells, and give the logits of rows `wanted`.

        `wanted` ascends and may be empty. Raises what torch raises for a forward's own fault (`RuntimeError`,
        `IndexError`, `MemoryError`); the batch's cells may hold anything then.
        """
        ...


@dataclass(slots=True)
class _Beats:
    """Written on the engine thread, read on any."""

    count: int = 0


class _BeatingAttention:
    """An `Attention` that counts its layers, so that somebody else sees the forward get on."""

    def __init__(self, attention: Attention, beats: _Beats) -> None:
        self._attention = attention
        self._beats = beats

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._beats.count += 1
        return self._attention.attend(layer, query, key, value)


class ReadyLogits:
    """A `SelectedLogits` of rows that were computed already: `logits` of the rows `wanted`, `hidden` of all."""

    def __init__(self, logits: Tensor, wanted: Sequence[int], hidden: Tensor, decoder: Decoder) -> None:
        self._logits = logits
        self._wanted = list(wanted)
        self._hidden = hidden
        self._decoder = decoder

    def rows(self, rows: Sequence[int]) -> Tensor:
        if list(rows) == self._wanted:
            return self._logits
        return self._logits.index_select(0, torch.tensor([self._wanted.index(row) for row in rows]))

    def normed(self, first: int, end: int) -> Tensor:
        return self._decoder.normed(self._hidden[first:end])


class EagerForwards:
    """Forwards of a decoder, operation by operation, of any width."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        make_attention: MakeAttention = attention_of,
        adapters: LoraSlots | None = None,
    ) -> None:
        """`pool`, and `adapters` if there are any, have the decoder's geometry, dtype and device."""
        self._decoder = decoder
        self._pool = pool
        self._make_attention = make_attention
        self._adapters = adapters
        self._beats = _Beats()

    @property
    def num_beats(self) -> int:
        return self._beats.count

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        config, device = self._decoder.config, self._decoder.device
        attention = self._make_attention(self._pool, spans_of(batch), config.windows, config.num_heads)
        tokens = torch.from_numpy(batch.tokens).to(device)
        positions = torch.from_numpy(batch.positions).to(device)
        beside = None if self._adapters is None else self._adapters.beside(batch)
        hidden = self._decoder.hidden(tokens, positions, _BeatingAttention(attention, self._beats), beside)
        return _Hidden(self._decoder, hidden, self._beats)


class _Hidden:
    """Logits are computed when they are asked for."""

    def __init__(self, decoder: Decoder, hidden: Tensor, beats: _Beats) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._beats = beats

    def rows(self, rows: Sequence[int]) -> Tensor:
        self._beats.count += 1
        if list(rows) == list(range(len(self._hidden))):
            return self._decoder.logits(self._hidden)
        chosen = torch.tensor(rows, dtype=torch.int64, device=self._hidden.device)
        return self._decoder.logits(self._hidden.index_select(0, chosen))

    def normed(self, first: int, end: int) -> Tensor:
        return self._decoder.normed(self._hidden[first:end])


def spans_of(batch: Batch) -> list[Span]:
    """The batch's rows as attention sees them."""
    return [Span(p.row, p.start, p.length, p.chunk.cells[: p.start + p.length]) for p in batch.pieces]

"""Forwards of a model with adapters: those that hold a row with one, and all others, each by what is best at them."""

from __future__ import annotations

from collections.abc import Sequence

from planner.slices import Method
from worker.batch import Batch
from worker.forwards import Forwards, SelectedLogits


class LoraForwards:
    """A `Forwards`. Both of its parts are over the same pool."""

    def __init__(self, plain: Forwards, adapted: Forwards) -> None:
        """`plain` computes with the model's own matrices alone, as fast as there is a way to."""
        self._plain = plain
        self._adapted = adapted

    @property
    def num_beats(self) -> int:
        return self._plain.num_beats + self._adapted.num_beats

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        has_adapter = any(piece.chunk.adapter is not None for piece in batch.pieces)
        return (self._adapted if has_adapter else self._plain).run(batch, method, wanted)

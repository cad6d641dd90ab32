"""What an executor asks where answers follow a grammar: the seam between drawing tokens and `worker.grammars`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from planner.errors import GrammarFailed
from planner.request import TokenArray
from planner.step import Chunk

BitMask = npt.NDArray[np.uint8]
"""uint8[words * 4]: bit i, lowest first, says whether token id i may be drawn. Ids beyond its end may not."""


class ConstrainedRow(NamedTuple):
    """A row whose draw follows a grammar. `generated`: all tokens of the answer before the drawn one. `masked` ids are
    not drawn either, unless nothing else is left."""

    sequence_id: int
    grammar: str
    generated: TokenArray
    masked: frozenset[int] = frozenset()


def constrained_row(chunk: Chunk, last_token: int | None = None) -> ConstrainedRow:
    """The row of a chunk whose sampling has a grammar. `last_token` is the one that the chunk feeds and that the
    planner did not know when it made the chunk."""
    assert chunk.sampling.grammar is not None
    assert chunk.history is not None
    generated = chunk.history[chunk.num_prompt :]
    if chunk.tokens is None:
        assert last_token is not None, "the token that only the device knew"
        generated = np.append(generated, last_token)
    return ConstrainedRow(chunk.sequence_id, chunk.sampling.grammar, generated, chunk.masked)


class MaskMaker(Protocol):
    """Owner: an executor. `prepare` and `drop` never block and are called by its thread; `masks` by one thread at a
    time."""

    def prepare(self, grammar: str) -> None:
        """A request with this grammar was accepted; what is slow to make for it may begin."""

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Forget these sequences; those that follow no grammar are passed over."""

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        """What each row may draw, or why its sequence cannot go on."""
        ...

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        """What each row's grammar leaves no choice in, the drawn token first; empty where it leaves one. Of rows whose
        masks were asked for in the same step."""
        ...

    def close(self) -> None: ...


class NoMasks:
    """A `MaskMaker` for executors that were given no vocabulary: whatever must follow a grammar fails."""

    def prepare(self, grammar: str) -> None:
        """Nothing can be made."""

    def drop(self, sequence_ids: Iterable[int]) -> None:
        """Nothing is known."""

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        return [GrammarFailed("this worker knows no vocabulary, so no answer of it can follow a grammar") for _ in rows]

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        return [() for _ in rows]

    def close(self) -> None:
        """Nothing is held."""

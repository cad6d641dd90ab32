"""A scriptable `MaskMaker`: its grammar is arithmetic, so a mask that is late, lost or another row's shows at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from planner.errors import GrammarFailed
from worker.masks import BitMask, ConstrainedRow


class LadderMasks:
    """Each token must be one more, modulo the number that is the row's grammar, than the one before it; the first is 0.

    With `fails_after`, a sequence cannot go on when it has generated so many tokens.
    """

    def __init__(self, vocab_size: int, fails_after: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._fails_after = fails_after
        self.dropped: list[int] = []

    def prepare(self, grammar: str) -> None:
        """Nothing is slow to make."""

    def drop(self, sequence_ids: Iterable[int]) -> None:
        self.dropped += sequence_ids

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        return [self._mask(row) for row in rows]

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        return [() for _ in rows]

    def close(self) -> None:
        """Nothing is held."""

    def _mask(self, row: ConstrainedRow) -> BitMask | GrammarFailed:
        if len(row.generated) == self._fails_after:
            return GrammarFailed("as it was told to")
        modulus = int(row.grammar)
        following = (int(row.generated[-1]) + 1) % modulus if len(row.generated) else 0
        return np.packbits(np.arange(self._vocab_size) % modulus == following, bitorder="little")


def climbs(tokens: Sequence[int], modulus: int) -> bool:
    return [token % modulus for token in tokens] == [place % modulus for place in range(len(tokens))]

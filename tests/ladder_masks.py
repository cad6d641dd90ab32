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


class ForcingMasks(LadderMasks):
    """A ladder of which some rungs leave no choice: a `#` in `pattern`, which repeats, leaves the lowest token alone.

    `tells`: whether it says so. `asked` are the sequences that it was asked of.
    """

    def __init__(self, vocab_size: int, pattern: str, *, tells: bool = True, fails_after: int | None = None) -> None:
        super().__init__(vocab_size, fails_after)
        self._pattern = pattern
        self._tells = tells
        self.asked: list[int] = []

    def forced(self, rows: Sequence[ConstrainedRow]) -> list[tuple[int, ...]]:
        self.asked += [row.sequence_id for row in rows]
        return [self._run(row) if self._tells and not row.masked else () for row in rows]

    def _run(self, row: ConstrainedRow) -> tuple[int, ...]:
        modulus, place = int(row.grammar), len(row.generated)
        token, run = int(row.generated[-1]) if place else -1, list[int]()
        while self._leaves_one(place + len(run)):
            token = (token + 1) % modulus
            run.append(token)
        return tuple(run)

    def _leaves_one(self, place: int) -> bool:
        return self._pattern[place % len(self._pattern)] == "#"

    def _mask(self, row: ConstrainedRow) -> BitMask | GrammarFailed:
        mask = super()._mask(row)
        if isinstance(mask, GrammarFailed) or not self._leaves_one(len(row.generated)):
            return mask
        bits = np.unpackbits(mask, bitorder="little")
        bits[int(row.grammar) :] = 0
        return np.packbits(bits, bitorder="little")


def climbs(tokens: Sequence[int], modulus: int) -> bool:
    return [token % modulus for token in tokens] == [place % modulus for place in range(len(tokens))]

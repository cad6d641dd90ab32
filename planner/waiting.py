"""The queue of sequences that wait for cells: by priority, then by arrival, whether new or preempted."""

from __future__ import annotations

import bisect

from planner.sequence import Sequence


class WaitingQueue:
    """Ordered by `Sequence.order`. Bounded by its owner, who refuses requests while it is full."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        at = self._place(sequence)
        return at < len(self._sequences) and self._sequences[at] is sequence

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill of all that wait, cached prefixes not considered."""
        return self._num_tokens

    @property
    def head(self) -> Sequence | None:
        """Who is next."""
        return self._sequences[0] if self._sequences else None

    def add(self, sequence: Sequence) -> None:
        self._sequences.insert(self._place(sequence), sequence)
        self._num_tokens += len(sequence.tokens)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        assert sequence in self
        del self._sequences[self._place(sequence)]
        self._num_tokens -= len(sequence.tokens)

    def _place(self, sequence: Sequence) -> int:
        return bisect.bisect_left(self._sequences, sequence.order, key=lambda waiting: waiting.order)

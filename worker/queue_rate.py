"""How fast the queue of prefill tokens moves, measured while there is one. Takes times, has no clock."""

from __future__ import annotations

import math
from typing import Final

MEMORY_S: Final = 5.0
"""What happened so long ago weighs 1/e."""

TRUSTED_AFTER_S: Final = 0.5
"""A shorter measurement is a step or two of some odd size."""

SHORTEST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0


class QueueRate:
    """Tokens that left the queue per second of the steps that left some in it. Owner: the engine thread.

    A step that empties the queue says how little there was to do and not how much could be done, so the measurement
    ends with it: one made under yesterday's load would refuse today's requests.
    """

    def __init__(self) -> None:
        self._num_tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """None while nothing was measured, or not for long enough, or nothing moved."""
        if self._seconds < TRUSTED_AFTER_S or self._num_tokens == 0:
            return None
        return self._num_tokens / self._seconds

    def note_step(self, num_tokens: int, seconds: float, *, left_some: bool) -> None:
        """A step of this duration took `num_tokens` from the queue; `left_some`: more could not be planned in it."""
        if not left_some:
            self._num_tokens = self._seconds = 0.0
            return
        kept = math.exp(-seconds / MEMORY_S)
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._seconds = self._seconds * kept + seconds


def retry_after_s(num_tokens: int, tokens_per_s: float | None) -> float:
    """When a queue of so many tokens will be empty, in seconds within bounds that a client can live with."""
    if tokens_per_s is None:
        return SHORTEST_RETRY_S
    return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, num_tokens / tokens_per_s))

"""How long a worker takes to give up what was cancelled: from the gateway's cancel to its word on the last sequence."""

from __future__ import annotations

from dataclasses import dataclass

from worker.distribution import Histogram


@dataclass(slots=True)
class _Sent:
    num_left: int
    cancelled_at: float | None = None


class CancelWatch:
    """Of the requests sent over one stream. Owner: that stream. Times in seconds, on one clock.

    Each sequence of a request that a worker took ends with exactly one word, also where a cancel and the end cross.
    """

    def __init__(self, free: Histogram) -> None:
        self._free = free
        self._sent: dict[int, _Sent] = {}

    def __len__(self) -> int:
        """Requests whose last word has not come."""
        return len(self._sent)

    def sent(self, request_id: int, num_sequences: int) -> None:
        self._sent[request_id] = _Sent(num_sequences)

    def never_sent(self, request_id: int) -> None:
        """It was cancelled before it was written: the worker has no word on it."""
        del self._sent[request_id]

    def cancelled(self, request_id: int, now: float) -> None:
        """The whole request was cancelled; the first time counts."""
        sent = self._sent.get(request_id)
        if sent is not None and sent.cancelled_at is None:
            sent.cancelled_at = now

    def ended(self, request_id: int, now: float, *, whole: bool = False) -> None:
        """The worker's last word on one sequence has come, or, when it refused them, on all."""
        sent = self._sent.get(request_id)
        if sent is None:
            return
        sent.num_left = 0 if whole else sent.num_left - 1
        if sent.num_left == 0:
            del self._sent[request_id]
            if sent.cancelled_at is not None:
                self._free.observe(now - sent.cancelled_at)

    def clear(self) -> None:
        """The stream broke."""
        self._sent.clear()

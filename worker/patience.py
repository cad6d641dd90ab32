"""What time means to requests: the planner has no clock, so this stands between it and the engine.

Refuses what the queue is too slow for, says when to come again, and ends what runs out of time.
"""

from __future__ import annotations

from planner.errors import DeadlineExceeded, DeadlineUnmeetable, QueueFull
from planner.planner import Planner
from planner.request import Request, Update
from worker.deadlines import Deadlines
from worker.queue_rate import QueueRate, retry_after_s


class Patience:
    """Owner: the engine thread, which says what time it is, on the clock of `Request.deadline`."""

    def __init__(self, planner: Planner) -> None:
        self.rate = QueueRate()
        self._planner = planner
        self._deadlines = Deadlines(planner.live)

    @property
    def retry_after_s(self) -> float:
        """When the queue of the moment will be through, in seconds within bounds."""
        return retry_after_s(self._planner.num_queued_tokens, self.rate.tokens_per_s)

    def submit(self, request: Request, now: float) -> int:
        """As `Planner.submit`. Raises `DeadlineUnmeetable` as well; a full queue says when to come again."""
        if request.deadline is not None and not request.num_generated:  # what goes on was accepted elsewhere
            self._check_deadline(request, request.deadline - now)
        try:
            request_id = self._planner.submit(request)
        except QueueFull as full:
            raise QueueFull(full.message, param=full.param, retry_after_s=self.retry_after_s) from full
        if request.deadline is not None:
            self._deadlines.add(request_id, request.deadline)
        return request_id

    def expire(self, now: float) -> list[Update]:
        """End the requests whose deadline has come: their sequences fail with `DeadlineExceeded`."""
        error = DeadlineExceeded("the request's deadline passed")
        return [u for request_id in self._deadlines.take_passed(now) for u in self._planner.fail(request_id, error)]

    def _check_deadline(self, request: Request, left_s: float) -> None:
        if left_s <= 0:
            raise DeadlineUnmeetable(
                "the deadline had passed when the request reached its worker", retry_after_s=self.retry_after_s
            )
        rate = self.rate.tokens_per_s
        if rate is None:
            return
        num_tokens = self._planner.tokens_before(request)
        if num_tokens > left_s * rate:
            raise DeadlineUnmeetable(
                f"the deadline is in {left_s:.3g} s, and {num_tokens} tokens of prompts go before, of which "
                f"{rate:.0f} are done a second: that takes {num_tokens / rate:.3g} s",
                retry_after_s=self.retry_after_s,
            )

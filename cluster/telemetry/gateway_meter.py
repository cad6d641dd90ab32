"""What a gateway counts of its requests. Prometheus' names for it are in `cluster.telemetry.gateway_metrics`."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Self

from cluster.answers.choice import Ending
from cluster.headers import Terms
from cluster.telemetry.events import Events
from cluster.telemetry.request_record import RequestRecord
from planner.errors import DeadlineExceeded, RaycombError, RequestRefused
from worker.distribution import Histogram

FIRST_TOKEN_BOUNDS_S: Final = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.1,
    0.15,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
BETWEEN_TOKENS_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
WHOLE_BOUNDS_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
FREE_BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class GatewayMeter:
    """Since the gateway started. Owner: its event loop. Times in seconds.

    Each request that asks for tokens ends in exactly one of `whole` (it ended by itself), `num_cancelled` (its client
    left), `refused` and `failed` (by the code of the error). `endings` counts choices. `num_open` are being answered.
    `free`: from a cancel to the worker's word that the request's last sequence has ended.
    """

    def __init__(self) -> None:
        self.num_open = 0
        self.num_prompt_tokens = 0
        self.num_tokens = 0
        self.num_cancelled = 0
        self.refused: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.endings: Counter[Ending] = Counter()
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_BOUNDS_S)
        self.whole = Histogram(WHOLE_BOUNDS_S)
        self.free = Histogram(FREE_BOUNDS_S)
        self.num_failovers = 0
        self.num_workers_lost = 0
        self.events = Events()

    def request(self, terms: Terms) -> RequestMeter:
        """For a request on these terms."""
        return RequestMeter(self, terms.arrived_at, terms.record)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Around what is done before a request has its own meter: counts how it ends there."""
        try:
            yield
        except BaseException as failure:
            self.note_failure(failure)
            raise

    def note_failure(self, failure: BaseException) -> None:
        """A request ended with this."""
        match failure:
            case asyncio.CancelledError() | GeneratorExit():
                self.num_cancelled += 1
            case RequestRefused():
                self.refused[failure.code] += 1
            case TimeoutError():
                self.failed[DeadlineExceeded.code] += 1
            case RaycombError():
                self.failed[failure.code] += 1
            case _:
                self.failed[RaycombError.code] += 1


class RequestMeter:
    """One request. Owner: the task that serves it, which runs the answer inside its `with` block.

    Tokens count as they come, so that they agree with what a client is told in `usage`, also of an answer that breaks
    off. Where several come at once, their time is shared evenly. What is measured of the request as a whole goes to its
    record, too.
    """

    def __init__(self, meter: GatewayMeter, arrived_at: float, record: RequestRecord) -> None:
        self._meter = meter
        self._arrived_at = arrived_at
        self._record = record
        self._last_at: dict[int, float] = {}  # by choice

    def __enter__(self) -> Self:
        self._meter.num_open += 1
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, failure: BaseException | None, _traceback: TracebackType | None
    ) -> None:
        self._meter.num_open -= 1
        if failure is None:
            self._meter.whole.observe(time.monotonic() - self._arrived_at)
        else:
            self._meter.note_failure(failure)
            self._record.note_failure(failure)

    def prompt(self, num_tokens: int) -> None:
        """A prompt was computed; each counts once, whatever n is."""
        self._meter.num_prompt_tokens += num_tokens
        self._record.num_prompt_tokens += num_tokens

    def tokens(self, choice: int, num_tokens: int) -> None:
        """A choice grew."""
        if num_tokens == 0:
            return
        now, meter = time.monotonic(), self._meter
        last_at = self._last_at.get(choice)
        if last_at is not None:
            meter.between_tokens.observe((now - last_at) / num_tokens, num_tokens)
        elif not self._last_at:
            meter.first_token.observe(now - self._arrived_at)
            self._record.first_token_s = now - self._arrived_at
        self._last_at[choice] = now
        meter.num_tokens += num_tokens
        self._record.num_tokens += num_tokens

    def ended(self, ending: Ending) -> None:
        """A choice ended by itself."""
        self._meter.endings[ending] += 1
        self._record.reasons.append(ending.value)

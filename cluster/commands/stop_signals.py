"""SIGINT and SIGTERM as a wish to end, that the main thread sees when it looks."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Self

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SAME_WISH_S: Final = 0.5


class StopSignals:
    """The first signal sets `wanted`; a second one raises `KeyboardInterrupt`. Main thread only.

    `timeout` and its like tell a process and then its whole group: what comes `SAME_WISH_S` after the first is no
    second wish.

    `install` may be called again where a library has put handlers of its own in between, as `ray.init` does.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.wanted = threading.Event()
        self._wanted_at = 0.0
        self._clock = clock
        self._before = {number: signal.getsignal(number) for number in NUMBERS}

    def install(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self.wanted.is_set():
            self._wanted_at = self._clock()
            self.wanted.set()
        elif self._clock() > self._wanted_at + SAME_WISH_S:
            raise KeyboardInterrupt

"""SIGINT and SIGTERM as a wish to end, that the main thread sees when it looks."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Until `looks_begin` a signal raises `KeyboardInterrupt`. After it the first one sets `wanted`, and only a second
    one raises. Main thread only.

    `install` may be called again where a library has put handlers of its own in between, as `ray.init` does.
    """

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self._somebody_looks = False
        self._before = {number: signal.getsignal(number) for number in NUMBERS}

    def install(self) -> None:
        for number in NUMBERS:
            signal.signal(number, self._on_signal)

    def looks_begin(self) -> None:
        """From now on there is something to end in order, and somebody who looks at `wanted`."""
        self._somebody_looks = True

    def __enter__(self) -> Self:
        self.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.wanted.is_set() or not self._somebody_looks:
            raise KeyboardInterrupt
        self.wanted.set()

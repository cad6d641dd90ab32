"""What happened to the fleet lately, as one gateway saw it: for people who look at the page."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final

MAX_EVENTS: Final = 100


@dataclass(frozen=True, slots=True)
class Event:
    """`at`: seconds since 1970."""

    at: float
    text: str


class Events:
    """The last ones, the newest last. Owner: the gateway's event loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)

    def note(self, text: str) -> None:
        self._events.append(Event(time.time(), text))

    @property
    def all(self) -> list[Event]:
        return list(self._events)

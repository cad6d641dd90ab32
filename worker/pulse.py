"""Whether an engine gets on: tells one that works through a long step from one that hangs.

A step may take minutes on a slow machine, so its length says nothing; what it does meanwhile beats. Takes times, has no
clock. Not for what follows from a hang: `worker.serving` and whoever runs the worker see to that.
"""

from __future__ import annotations

from typing import Final, NamedTuple

LOOK_S: Final = 1.0
"""How often an engine is looked at."""


class Pulse(NamedTuple):
    """Of an engine at one moment. `num_beats` grows whenever it gets on, within a step too; while `idle` it waits for
    something to do."""

    num_beats: int
    idle: bool


class PulseWatch:
    """Feels the pulse of one engine, every `LOOK_S`. Owner: whoever calls `look`, from one thread."""

    def __init__(self, now: float) -> None:
        """`now` is on the clock of all later times, in seconds."""
        self._last: Pulse | None = None
        self._looked_at = now
        self._quiet_s = 0.0

    @property
    def quiet_s(self) -> float:
        """For how long the engine had something to do and did not get on, in seconds, up to the last look."""
        return self._quiet_s

    def look(self, pulse: Pulse, now: float) -> bool:
        """Whether the engine got on since the last look, or has nothing to do.

        A look that comes late counts as one in time: then this process had no processor, and so had the engine.
        """
        alive = pulse.idle or pulse != self._last
        self._quiet_s = 0.0 if alive else self._quiet_s + min(now - self._looked_at, 2 * LOOK_S)
        self._last = pulse
        self._looked_at = now
        return alive

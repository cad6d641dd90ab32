"""That a request got a seat or lost it: told to whoever measures, and no part of any decision."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class MoveKind(Enum):
    """A request is admitted once. Its sequences may be preempted, and then resume."""

    ADMITTED = "admitted"
    PREEMPTED = "preempted"
    RESUMED = "resumed"


class Move(NamedTuple):
    """`request_id` is the planner's."""

    request_id: int
    kind: MoveKind

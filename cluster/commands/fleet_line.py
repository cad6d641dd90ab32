"""The line that a terminal is told of a fleet: how many of its processes are ready. Free of Ray, and says nothing by
itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.config import ServiceConfig

States = Mapping[str, int]
"""How many replicas of a deployment are in each of Serve's states."""

_GONE: Final = frozenset({"STOPPING", "STOPPED"})


@dataclass(slots=True)
class LastTold:
    """The line that was told last, and when. Owner: whoever tells."""

    line: str = ""
    at: float = -math.inf

    def is_news(self, line: str, now: float, again_s: float = math.inf) -> bool:
        """Whether to tell `line` at `now`, seconds of any clock: it is another one, or `again_s` have passed. It then
        counts as told."""
        if line == self.line and now - self.at < again_s:
            return False
        self.line, self.at = line, now
        return True


def fleet_line(workers: Sequence[States], gateways: States, config: ServiceConfig) -> str:
    """Workers (of each model) and gateways that are ready, of those that are wanted: as many as the settings say, or
    as the load asks for."""
    wanted = sum(max(one.num_workers, _num_there(states)) for one, states in zip(config.each, workers, strict=True))
    return (
        f"workers ready {sum(map(_num_ready, workers))}/{wanted}, "
        f"gateways ready {_num_ready(gateways)}/{max(config.num_gateways, _num_there(gateways))}"
    )


def _num_ready(states: States) -> int:
    return sum(count for state, count in states.items() if state == "RUNNING")


def _num_there(states: States) -> int:
    return sum(count for state, count in states.items() if state not in _GONE)

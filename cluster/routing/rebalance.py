"""Requests that wait at one worker while another has room: they are asked back, and placed anew.

They have waited since before that worker came, or became free. What has begun stays where it is. Each gateway looks at
what is its own; which worker lacks room, and how much the others have, is `cluster.routing.placement.surplus`'s.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Final, Protocol

from cluster.routing.backlog import Backlog
from cluster.routing.router import Router
from cluster.telemetry.gateway_meter import GatewayMeter

LOOK_S: Final = 0.25
"""Between two looks: a request that is asked back is gone from the worker's queue after one of its steps."""


class Giver(Protocol):
    """A stream to a worker."""

    @property
    def backlog(self) -> Backlog: ...

    def recall(self, count: int) -> int:
        """Ask the last `count` of the backlog back, or all; how many those are."""
        ...


class Rebalancer:
    """Looks now and then. Owner: `Streams`, on the gateway's event loop; `givers` are its streams, by worker id."""

    def __init__(self, router: Router, givers: Mapping[str, Giver], meter: GatewayMeter) -> None:
        self._router, self._givers, self._meter = router, givers, meter
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Harmless the second time."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._turn)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Ask back what others have room for: of that no larger part than of what waits is this gateway's own."""
        if not any(giver.backlog.num_movable for giver in self._givers.values()):
            return
        for worker_id, surplus in self._router.surplus().items():
            giver = self._givers.get(worker_id)
            if giver is None:
                continue
            share = min(1.0, giver.backlog.num_movable / surplus.num_waiting)
            num_wanted = math.ceil(surplus.num_elsewhere * share) - giver.backlog.num_recalled
            if num_wanted > 0 and (num_recalled := giver.recall(num_wanted)):
                self._meter.events.note(f"{num_recalled} requests that waited at {worker_id} were asked back")

    def _turn(self) -> None:
        self._timer = None
        self.look()
        self.start()

"""Whether a worker that takes requests is about to come, where none is there: Serve replaces what it takes away.

A worker that drains, or is taken out of the membership while it runs, makes room for another: in a redeploy the last
of the old may leave before the first of the new is heard of, and which of the two is heard of first is chance. How long
the other one takes depends on the host and the model. Not for workers that are lost: `cluster.routing.failover` decides
what becomes of their runs, and new requests are told at once that nobody is there.
"""

from __future__ import annotations

import asyncio


class Succession:
    """One gateway's view of it. Owner: `cluster.routing.streams.Streams`, on the event loop whose clock it reads.

    `patience_s`: how long after the last one left another is expected. `possible`: whether anybody follows at all;
    where the service ends, nobody does.
    """

    def __init__(self, patience_s: float) -> None:
        self.possible = True
        self._patience_s = patience_s
        self._expected_since: float | None = None
        self._loop = asyncio.get_running_loop()

    def begin(self) -> None:
        """A worker makes room for another, or is to be the first."""
        self._expected_since = self._loop.time()

    @property
    def is_due(self) -> bool:
        """Whether one is expected now, if no other is there."""
        since = self._expected_since
        return self.possible and since is not None and self._loop.time() - since < self._patience_s

"""Who hears what a stream to a worker brings: the seam between `cluster.routing.worker_stream` and those behind it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from cluster.routing.router import WorkerInfo
from cluster.routing.run import Run
from planner.blocks import BlockChanges
from planner.errors import RequestRefused, WorkerLost
from planner.limits import Snapshot
from planner.request import Adapter


class StreamObserver(Protocol):
    """Who hears of a worker: the gateway's router."""

    def join(self, info: WorkerInfo) -> None: ...

    def leave(self, worker_id: str) -> None: ...

    def observe(self, worker_id: str, snapshot: Snapshot, *, draining: bool, newest_request: int) -> None: ...

    def learn(self, worker_id: str, changes: BlockChanges) -> None: ...

    def equip(self, worker_id: str, adapters: Collection[Adapter]) -> None: ...

    def settle(self, worker_id: str, request_id: int, num_cached_tokens: int | None = None) -> None: ...


class RunKeeper(Protocol):
    """Who hears of runs that are without a worker, and sees to it that they end: the gateway's failover."""

    def lost(self, runs: Iterable[Run], error: WorkerLost) -> None: ...

    def refused(self, run: Run, worker_id: str, refusal: RequestRefused) -> None: ...

    def recalled(self, run: Run) -> None: ...

"""Which workers there are, as Serve sees them: from its long poll to whoever in this process subscribes.

Serve tells a deployment's request router, in every process that holds a handle to it, the set of running replicas
with what each recorded in `record_replica_metadata`. Serve pickles a router class by value, so the class gets copies
of its module's globals; therefore `MembershipRouter` imports this module anew when it runs and hands what it hears to
`board()`, of which there is one a process, as there is one Serve a process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ray.serve.request_router import RequestRouter

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, RunningReplica


@dataclass(frozen=True, slots=True)
class Member:
    """A running worker: its identity, and where its data plane listens (host:port)."""

    worker_id: str
    address: str


Members = Mapping[str, Member]
Listener = Callable[[Members], None]


class MembershipBoard:
    """The last membership of each deployment, and who wants to hear of it. Any thread.

    Listeners are called on the thread that publishes (Serve's), one at a time and in order.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._members: dict[str, Members] = {}
        self._listeners: dict[str, list[Listener]] = {}

    def publish(self, deployment: str, members: Members) -> None:
        with self._lock:
            self._members[deployment] = members
            for listener in list(self._listeners.get(deployment, ())):
                listener(members)

    def subscribe(self, deployment: str, listener: Listener) -> Callable[[], None]:
        """Call `listener` with the membership as it is (if known) and at each change; gives the way to end that."""
        with self._lock:
            listeners = self._listeners.setdefault(deployment, [])
            listeners.append(listener)
            if deployment in self._members:
                listener(self._members[deployment])

        def unsubscribe() -> None:
            with self._lock:
                if listener in listeners:
                    listeners.remove(listener)

        return unsubscribe


@cache
def board() -> MembershipBoard:
    """The process's one board."""
    return MembershipBoard()


def board_key(app_name: str, deployment_name: str) -> str:
    """The board's name of a deployment."""
    return f"{app_name}/{deployment_name}"


def members_of(metadata: Iterable[Mapping[str, str]]) -> Members:
    """Members from what replicas recorded; a replica that recorded nothing yet is none."""
    known = [Member(entry["worker_id"], entry["address"]) for entry in metadata if "address" in entry]
    return {member.worker_id: member for member in known}


class MembershipRouter(RequestRouter):
    """Serve's request router for workers: passes the membership on, and routes the few control calls anywhere."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        from cluster.membership import board, board_key, members_of

        key = board_key(self.app_name, self._deployment_id.name)
        board().publish(key, members_of([replica.replica_metadata for replica in replicas]))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        return [candidate_replicas]

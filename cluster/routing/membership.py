"""Which workers there are: from whoever learns it (`cluster.routing.membership_router`) to whoever subscribes in this
process.

Free of Ray.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True)
class Member:
    """A running worker: its identity, where its data plane listens (host:port), and what it runs, where that is told:
    a sequence of one worker can go on at another of the same `program` only."""

    worker_id: str
    address: str
    program: str | None = None


Members = Mapping[str, Member]
Listener = Callable[[Members], None]


class MembershipBoard:
    """The last membership of each deployment, and who wants to hear of it. Any thread.

    Listeners are called on the thread that publishes or subscribes, one at a time and in order.
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
    """The process's one board. It is found by name, not handed over, because Serve makes the publisher out of reach."""
    return MembershipBoard()


def board_key(app_name: str, deployment_name: str) -> str:
    """The board's name of a deployment."""
    return f"{app_name}/{deployment_name}"


def follow_members(deployment: str, listener: Listener) -> Callable[[], None]:
    """Call `listener` on the running loop with the membership as it is (if known) and at each change; gives the way to
    end that. `deployment`: its key on the process's board."""
    loop = asyncio.get_running_loop()

    def hear(members: Members) -> None:  # on Serve's router thread
        loop.call_soon_threadsafe(listener, members)

    return board().subscribe(deployment, hear)


def members_of(metadata: Iterable[Mapping[str, str]]) -> Members:
    """Members from what replicas recorded; a replica that recorded nothing yet is none."""
    known = [
        Member(entry["worker_id"], entry["address"], entry.get("program")) for entry in metadata if "address" in entry
    ]
    return {member.worker_id: member for member in known}

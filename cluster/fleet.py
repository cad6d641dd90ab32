"""What the endpoints see of the workers: a place to submit a request, and the stream of its updates.

The real one (`cluster.streams`) speaks gRPC to every worker; tests hand the endpoints a scripted fake.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from planner.request import Request, Update


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. `capacity` is the cells of the smallest worker pool."""

    name: str
    created: int
    vocab_size: int
    context: int
    capacity: int
    max_num_seqs: int


class Generation(Protocol):
    """Updates of one submitted request. Owner: the task that submitted it. Lives on the event loop."""

    async def next(self) -> list[Update]:
        """Wait for news; return all that has come (at most one update an index, tokens in order).

        An index's last update has a `finish_reason`. Raises `RequestRefused` from the first call when no worker took
        the request. Must not be called again after every index has finished. May be cancelled while it waits; nothing
        is lost then.
        """
        ...

    def cancel(self, indices: Collection[int] | None = None) -> None:
        """End all sequences, or those listed, at the worker's next step. Never blocks; harmless after the end.

        What comes for a cancelled index afterwards is not delivered, and the index counts as finished.
        """
        ...


class Fleet(Protocol):
    """All workers behind one door. Owner: the gateway."""

    @property
    def model(self) -> ServedModel | None:
        """None until the first worker has said what it serves."""
        ...

    @property
    def ready(self) -> bool:
        """Whether at least one worker takes requests now."""
        ...

    def submit(self, request: Request) -> Generation:
        """Assign and send a request. Raises `Unavailable` or `QueueFull` at once; nothing has then been sent."""
        ...

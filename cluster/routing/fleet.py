"""What the endpoints see of the workers: a place to submit a request, and the stream of its updates.

The real one (`cluster.routing.streams`) speaks gRPC to every worker; tests hand the endpoints a scripted fake.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.routing.router import Predictions, WorkerInfo
from planner.limits import Snapshot
from planner.request import Adapter, Request, Update
from worker.totals import Totals


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients see it. `capacity` is the cells of the smallest worker pool; `vector_size` the numbers of a
    prompt's vector, None where it gives none."""

    name: str
    created: int
    vocab_size: int
    context: int
    capacity: int
    max_num_seqs: int
    vector_size: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The last that a worker said of itself. `draining`: it takes no new requests."""

    info: WorkerInfo
    snapshot: Snapshot
    draining: bool
    totals: Totals


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
    def adapters(self) -> Mapping[str, Adapter]:
        """By name, those that requests may have now."""
        ...

    def num_without(self, name: str) -> int:
        """How many workers have no adapter of this name."""
        ...

    @property
    def ready(self) -> bool:
        """Whether at least one worker takes requests now."""
        ...

    @property
    def reports(self) -> Sequence[WorkerReport]:
        """Of every worker with an open stream that has spoken."""
        ...

    @property
    def predictions(self) -> Predictions:
        """How well it was foreseen what prompts would find resident."""
        ...

    def submit(self, request: Request) -> Generation:
        """Assign and send a request. Raises `Unavailable` or `QueueFull` at once; nothing has then been sent."""
        ...

"""One user of an engine: what it may ask, on any thread, and what it is told. Not the network: `worker.serving` is."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from planner.blocks import BlockChanges
from planner.limits import Snapshot
from planner.request import Adapter, Request
from worker.desk import News
from worker.inbox import Inbox
from worker.totals import Totals


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step's news for one client: (its key, update or refusal), and the state of the worker after the step.

    `blocks` are the changes of what is resident since the client's last report; in its first one, all of it. `totals`
    come now and then, with the first report, and when the engine becomes idle. `adapters` are those that take requests,
    in the first report and when that changed.
    """

    updates: tuple[News, ...]
    snapshot: Snapshot
    blocks: BlockChanges = field(default_factory=BlockChanges)
    totals: Totals | None = None
    adapters: tuple[Adapter, ...] | None = None


Listener = Callable[[StepReport], None]


class Client:
    """One user of the engine, with keys of its own choosing for its requests. Its methods may be called on any
    thread, also from inside the listener; they return at once."""

    def __init__(self, inbox: Inbox[Client], listener: Listener) -> None:
        self._inbox = inbox
        self.listener = listener

    def submit(self, key: int, request: Request) -> None:
        """Ask for `request`. Updates come under `key`, or one refusal and nothing else.

        Raises `QueueFull` when the inbox is full, `Unavailable` when the engine takes nothing more, `InvalidRequest`
        when `key` is live. Nothing will come then.
        """
        self._inbox.submit(self, key, request)

    def cancel(self, key: int, indices: Collection[int] | None = None) -> None:
        """End all sequences of `key`, or those of `indices`, at the next step. Harmless after the end."""
        self._inbox.cancel(self, key, indices)

    def recall(self, key: int) -> None:
        """Have `key` refused with `Unavailable` if nothing of it has run yet. Harmless if it has."""
        self._inbox.recall(self, key)

    def close(self) -> None:
        """Cancel everything, and hear no more than of the step that runs now. Harmless the second time."""
        self._inbox.close(self)

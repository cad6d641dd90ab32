"""One gateway's view of the workers, kept fresh by what they report, and the assignment of requests by it.

Owner: the gateway's event loop. Decides by `cluster.placement`; moves no bytes and knows no streams.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from cluster.placement import Candidate, Need, assign
from planner.errors import RaycombError
from planner.limits import Snapshot
from planner.request import Request

STEPS_UNTIL_SEEN = 2
"""A request sent while a worker runs step s is in its snapshot after step s + 2 at the latest: its inbox is read
between steps, and one more step may be planned by then."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker said of itself when its stream opened; it does not change while the worker lives."""

    worker_id: str
    model: str
    vocab_size: int
    context: int
    num_cells: int
    max_prefill_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that the worker's snapshot may not count yet, and the snapshot's step when it was sent."""

    step: int
    need: Need


@dataclass(slots=True)
class _View:
    info: WorkerInfo
    snapshot: Snapshot | None = None
    draining: bool = False
    sent: dict[int, _Sent] = field(default_factory=dict)  # by request id

    @property
    def step(self) -> int:
        return 0 if self.snapshot is None else self.snapshot.step


class Router:
    """Assigns requests to the workers that take them now.

    `max_waiting` is the bound of a worker's own queue. `offset` turns the order in which ties are broken, so that
    several gateways with equal views do not all start at the same worker.
    """

    def __init__(self, *, max_waiting: int, offset: int = 0) -> None:
        self._max_waiting = max_waiting
        self._offset = offset
        self._views: dict[str, _View] = {}

    def join(self, info: WorkerInfo) -> None:
        """The worker's stream is open: it takes requests from now on."""
        self._views[info.worker_id] = _View(info)

    def leave(self, worker_id: str) -> None:
        """Assign nothing more to the worker. Harmless if it is not here."""
        self._views.pop(worker_id, None)

    def observe(self, worker_id: str, snapshot: Snapshot, *, draining: bool) -> None:
        """Take in a worker's news; what it must have seen by now no longer counts as sent since."""
        view = self._views.get(worker_id)
        if view is None:
            return
        view.snapshot = snapshot
        view.draining = draining
        seen = [key for key, sent in view.sent.items() if sent.step + STEPS_UNTIL_SEEN <= snapshot.step]
        for request_id in seen:
            del view.sent[request_id]

    def settle(self, worker_id: str, request_id: int) -> None:
        """The request was answered, refused, cancelled or never sent: it no longer counts as sent since."""
        if (view := self._views.get(worker_id)) is not None:
            view.sent.pop(request_id, None)

    @property
    def ready(self) -> bool:
        """Whether some worker takes requests."""
        return any(not view.draining for view in self._views.values())

    @property
    def infos(self) -> list[WorkerInfo]:
        """Of all workers whose stream is open, in the order in which they came."""
        return [view.info for view in self._views.values()]

    def assign(self, request_id: int, request: Request, *, avoid: Collection[str] = ()) -> str:
        """The id of the worker that shall run `request`, which then counts as sent to it; none of those in `avoid`.

        Raises `Unavailable` or `QueueFull`; nothing has then changed.
        """
        need = Need(prompt_tokens=len(request.prompt), num_sequences=request.n)
        ids = sorted(self._views.keys() - avoid)
        turn = self._offset % len(ids) if ids else 0
        choice = assign(need, [self._candidate(self._views[worker_id]) for worker_id in ids[turn:] + ids[:turn]])
        if isinstance(choice, RaycombError):
            raise choice
        view = self._views[choice]
        view.sent[request_id] = _Sent(view.step, need)
        return choice

    def _candidate(self, view: _View) -> Candidate:
        info, snapshot = view.info, view.snapshot
        num_sent = sum(sent.need.num_sequences for sent in view.sent.values())
        tokens_sent = sum(sent.need.prompt_tokens for sent in view.sent.values())
        free = info.num_cells if snapshot is None else snapshot.free_cells + snapshot.cached_cells
        running = 0 if snapshot is None else snapshot.num_running
        waiting = 0 if snapshot is None else snapshot.num_waiting
        seats = max(0, info.max_num_seqs - running)
        return Candidate(
            worker_id=info.worker_id,
            accepts=not view.draining,
            free_cells=max(0, free - tokens_sent),
            num_running=running + min(seats, num_sent),
            num_waiting=waiting + max(0, num_sent - seats),
            queued_prefill_tokens=tokens_sent + (0 if snapshot is None else snapshot.queued_prefill_tokens),
            max_num_seqs=info.max_num_seqs,
            max_waiting=self._max_waiting,
            max_prefill_tokens=info.max_prefill_tokens,
        )

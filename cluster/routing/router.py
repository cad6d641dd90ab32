"""One gateway's view of the workers, kept fresh by what they report, and the assignment of requests by it.

Owner: the gateway's event loop. Decides by `cluster.routing.placement`; moves no bytes and knows no streams.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt

from cluster.routing.placement import Candidate, Candidates, Need, Surplus, able, assign, surplus
from cluster.routing.residents import ResidentIndex
from planner.blocks import BlockChanges, block_hashes
from planner.errors import RaycombError, Unavailable
from planner.limits import Snapshot
from planner.outlook import expected_answer_tokens
from planner.request import Adapter, Request


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
    vector_size: int | None = None


@dataclass(slots=True)
class Predictions:
    """Ever growing: prompt tokens of requests whose first token came, how many of those were expected to be found
    resident, and how many were."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request that the worker has not answered yet, and what was expected of it."""

    need: Need
    answer_tokens: int
    num_cached: int
    expected_blocks: tuple[int, ...]

    @property
    def num_to_prefill(self) -> int:
        return max(1, self.need.prompt_tokens - self.num_cached)


@dataclass(slots=True)
class _View:
    """`unseen` are those of `sent` that the snapshot does not count yet; by request id both. `num_seen` and
    `num_seen_cached` are the prompt tokens of those that it does count, and how many of them are expected resident."""

    info: WorkerInfo
    row: int
    snapshot: Snapshot | None = None
    draining: bool = False
    adapters: frozenset[Adapter] = frozenset()
    sent: dict[int, _Sent] = field(default_factory=dict)
    unseen: dict[int, _Sent] = field(default_factory=dict)
    num_seen: int = 0
    num_seen_cached: int = 0

    @property
    def num_queued(self) -> int:
        """Tokens of the worker's queue that it will have to compute: it counts waiting prompts as a whole. What this
        gateway knows of its own is taken to hold for those of other gateways too."""
        num_queued = 0 if self.snapshot is None else self.snapshot.queued_prefill_tokens
        if self.num_seen:
            num_queued = num_queued * (self.num_seen - self.num_seen_cached) // self.num_seen
        return num_queued

    def count(self, sent: _Sent, sign: int) -> None:
        """Let the snapshot count a request from now on (1), or no more (-1)."""
        self.num_seen += sign * sent.need.prompt_tokens
        self.num_seen_cached += sign * sent.num_cached


class Router:
    """Assigns requests to the workers that take them now.

    `max_waiting` and `max_waiting_tokens` are the bounds of a worker's own queue. `offset` turns the order in which
    ties are broken, so that several gateways with equal views do not all start at the same worker.
    """

    def __init__(self, *, max_waiting: int, max_waiting_tokens: int = 2**24, offset: int = 0) -> None:
        self.predictions = Predictions()
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._offset = offset
        self._views: dict[str, _View] = {}
        self._by_row: dict[int, _View] = {}
        self._rows = np.empty(0, np.int64)  # in the order of ids, which all gateways share
        self._candidates = Candidates()
        self._residents = ResidentIndex()

    def join(self, info: WorkerInfo) -> None:
        """The worker's stream is open: it takes requests from now on."""
        self.leave(info.worker_id)
        row = next(row for row in count() if row not in self._by_row)
        view = _View(info, row)
        self._views[info.worker_id] = self._by_row[row] = view
        self._rows = self._rows_by_id()
        self._residents.open(row)
        self._judge(view)

    def leave(self, worker_id: str) -> None:
        """Assign nothing more to the worker. Harmless if it is not here."""
        view = self._views.pop(worker_id, None)
        if view is not None:
            del self._by_row[view.row]
            self._rows = self._rows_by_id()
            self._residents.close(view.row)

    def observe(self, worker_id: str, snapshot: Snapshot, *, draining: bool, newest_request: int) -> None:
        """Take in a worker's news, which counts what was sent to it up to `newest_request`: ids ascend."""
        view = self._views.get(worker_id)
        if view is None:
            return
        view.snapshot = snapshot
        view.draining = draining
        for request_id in [key for key in view.unseen if key <= newest_request]:
            view.count(view.unseen.pop(request_id), 1)
        self._judge(view)

    def learn(self, worker_id: str, changes: BlockChanges) -> None:
        """Take in which prefixes became resident on a worker, and which went."""
        if (view := self._views.get(worker_id)) is not None:
            self._residents.learn(view.row, changes)

    def equip(self, worker_id: str, adapters: Collection[Adapter]) -> None:
        """Take in which adapters a worker takes requests for, all of them."""
        if (view := self._views.get(worker_id)) is not None:
            view.adapters = frozenset(adapters)

    def settle(self, worker_id: str, request_id: int, num_cached_tokens: int | None = None) -> None:
        """The request was answered, refused, cancelled or never sent: it no longer counts as sent since.

        `num_cached_tokens`, where its first token came: what it found resident.
        """
        view = self._views.get(worker_id)
        sent = None if view is None else view.sent.pop(request_id, None)
        if view is None or sent is None:
            return
        self._residents.settle(view.row, sent.expected_blocks)
        if view.unseen.pop(request_id, None) is None:
            view.count(sent, -1)
        self._judge(view)
        if num_cached_tokens is not None:
            self.predictions.num_requests += 1
            self.predictions.num_prompt_tokens += sent.need.prompt_tokens
            self.predictions.num_predicted_tokens += sent.num_cached
            self.predictions.num_cached_tokens += num_cached_tokens

    @property
    def ready(self) -> bool:
        """Whether some worker takes requests."""
        return any(not view.draining for view in self._views.values())

    @property
    def adapters(self) -> dict[str, Adapter]:
        """By name, those that some worker takes requests for. Where workers have others under one name, because files
        changed between their starts, it is that of the worker which came last."""
        return {adapter.name: adapter for view in self._views.values() for adapter in sorted(view.adapters)}

    def num_without(self, name: str) -> int:
        """How many workers take requests, but none for an adapter of this name."""
        return sum(name not in {each.name for each in view.adapters} for view in self._views.values())

    @property
    def infos(self) -> list[WorkerInfo]:
        """Of all workers whose stream is open, in the order in which they came."""
        return [view.info for view in self._views.values()]

    def assign(
        self, request_id: int, request: Request, *, owner: str | None = None, avoid: Collection[str] = ()
    ) -> str:
        """The id of the worker that shall run `request`, which then counts as sent to it; none of those in `avoid`.

        `owner` is the worker that holds what the request goes on with. It runs the request if it takes any now;
        where it is gone, drains or is full the others are asked as for any request.
        Raises `Unavailable` or `QueueFull`; nothing has then changed.
        """
        rows = able(self._candidates, self._rows_for(request, avoid))
        if isinstance(rows, RaycombError):
            raise rows
        # The last token is always computed, so a block that ends with it would promise one token too many.
        blocks = () if request.prompt_logprobs else tuple(block_hashes(request.prompt[:-1], request.root))
        owning = None if owner is None else self._views.get(owner)
        need = Need(len(request.prompt), request.n, blocks, None if owning is None else owning.row)
        cached = self._residents.cached_tokens(blocks, len(self._candidates))
        # Equal prefixes turn to the same worker, and different ones to different workers.
        turn = blocks[0] if blocks else self._offset
        view = self._by_row[assign(need, self._candidates, rows, cached, turn)]
        num_expected = self._residents.expect(view.row, blocks)
        ends_per_token = 0.0 if view.snapshot is None else view.snapshot.ends_per_token
        answer_tokens = expected_answer_tokens(request, ends_per_token)
        sent = _Sent(need, answer_tokens, int(cached[view.row]), blocks[:num_expected])
        view.sent[request_id] = view.unseen[request_id] = sent
        self._judge(view)
        return view.info.worker_id

    def surplus(self) -> dict[str, Surplus]:
        """By id, the workers at which requests wait that would find room elsewhere."""
        return {self._by_row[row].info.worker_id: found for row, found in surplus(self._candidates, self._rows).items()}

    def _rows_for(self, request: Request, avoid: Collection[str]) -> npt.NDArray[np.int64]:
        """Of workers that may run it as far as it is concerned. Raises `Unavailable` where none has its adapter."""
        rows = self._rows
        if request.adapter is not None:
            having = [view.row for view in self._views.values() if request.adapter in view.adapters]
            rows = rows[np.isin(rows, having)]
            if len(self._rows) and not len(rows):
                raise Unavailable(f"no worker has the adapter {request.adapter.name!r} now")
        avoided = [view.row for worker_id in avoid if (view := self._views.get(worker_id)) is not None]
        return rows[~np.isin(rows, avoided)] if avoided else rows

    def _rows_by_id(self) -> npt.NDArray[np.int64]:
        return np.array([self._views[worker_id].row for worker_id in sorted(self._views)], np.int64)

    def _judge(self, view: _View) -> None:
        """Bring a worker's candidate up to date: what the snapshot says, and what was sent since on top."""
        info, snapshot = view.info, view.snapshot
        running = 0 if snapshot is None else snapshot.num_running
        waiting = 0 if snapshot is None else snapshot.num_waiting
        free = info.num_cells if snapshot is None else snapshot.free_cells + snapshot.cached_cells
        answers = 0 if snapshot is None else snapshot.answer_tokens
        wanted, prefill = running + waiting, 0
        for sent in view.unseen.values():
            num_sequences = sent.need.num_sequences
            wanted += num_sequences
            prefill += sent.num_to_prefill
            answers += sent.answer_tokens
            if running + num_sequences <= info.max_num_seqs:
                running += num_sequences
            else:
                waiting += 1
        self._candidates[view.row] = Candidate(
            accepts=not view.draining,
            free_cells=max(0, free - prefill),
            num_running=running,
            num_seats_wanted=wanted,
            num_waiting=waiting,
            queued_prefill_tokens=view.num_queued + prefill,
            answer_tokens=answers,
            max_num_seqs=info.max_num_seqs,
            max_waiting=self._max_waiting,
            max_waiting_tokens=self._max_waiting_tokens,
            max_prefill_tokens=info.max_prefill_tokens,
            queue_tokens_per_s=0 if snapshot is None else math.ceil(snapshot.queue_tokens_per_s or 0),
        )

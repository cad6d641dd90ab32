"""The requests that live: how their sequences come, fork, end and leave.

An answer ends when its client knows so, and its sequence leaves when nobody needs what it computes any more: a leader
computes the prompt on for those that will fork from it. Its cells are back once no step in flight holds them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView

from planner.errors import RequestFailed
from planner.memory import Memory
from planner.metrics import Metrics
from planner.outlook import Outlook
from planner.request import FinishReason, Request, Update
from planner.schedule import Schedule
from planner.sequence import Family, Sequence, accept


class Families:
    """Owner of every accepted request that has not ended, by its id. It tells schedule, memory and outlook of who comes
    and goes.

    Every index of a family gets exactly one terminal update: the one that `end` or `fail` returns, or the caller's own
    after `close`.
    """

    def __init__(self, schedule: Schedule, memory: Memory, outlook: Outlook, metrics: Metrics) -> None:
        self._schedule = schedule
        self._memory = memory
        self._outlook = outlook
        self._metrics = metrics
        self._families: dict[int, Family] = {}
        self._last_request_id = 0

    @property
    def ids(self) -> KeysView[int]:
        """Of the requests that have not ended; the view follows them."""
        return self._families.keys()

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def get(self, request_id: int) -> Family | None:
        """None for one that has ended or never was."""
        return self._families.get(request_id)

    def accept(self, request: Request) -> int:
        """A request that was checked: its first sequence waits. Returns its id, which ascends from 1."""
        self._last_request_id += 1
        family = accept(self._last_request_id, request)
        self._families[family.request_id] = family
        self._schedule.waiting.add(family.live[0])
        self._outlook.accept(request)
        self._metrics.num_requests_submitted += 1
        self._metrics.num_sequences_accepted += request.n
        return family.request_id

    def fork(self, leader: Sequence) -> list[Update]:
        """The prompt is committed: start the sequences that waited for it, or end them if nothing is to follow."""
        family = leader.family
        if family.leader is not leader:
            return []
        indices = sorted(family.unforked)
        if family.request.max_tokens == 0:
            return self.end(family, FinishReason.LENGTH, indices)
        for index in indices:
            sequence = family.spawn(index)
            self._memory.fork(leader, sequence)
            self._schedule.run_fork(sequence)
        family.unforked.clear()
        self._dismiss_leader(family)
        return []

    def fail(self, sequence: Sequence, error: RequestFailed) -> list[Update]:
        """End a sequence whose chunk failed, and those that waited to fork from it."""
        family = sequence.family
        indices = family.indices if family.leader is sequence else [sequence.index]
        if sequence.finish_reason is not None:
            sequence.finish_reason = FinishReason.FAILED  # it had ended, and computed on for the others
        return self.end(family, FinishReason.FAILED, indices, error)

    def end(
        self, family: Family, reason: FinishReason, indices: Collection[int], error: RequestFailed | None = None
    ) -> list[Update]:
        """End sequences that have no other news; returns their terminal updates."""
        for index in indices:
            self.close(family, index, reason)
        num_cached = family.num_cached_tokens or 0
        return [
            Update(family.request_id, index, num_cached_tokens=num_cached, finish_reason=reason, error=error)
            for index in indices
        ]

    def end_all(self, reason: FinishReason, error: RequestFailed | None = None) -> list[Update]:
        """End every sequence; returns their terminal updates, by request and index."""
        return [update for family in list(self) for update in self.end(family, reason, family.indices, error)]

    def close(self, family: Family, index: int, reason: FinishReason) -> None:
        """Note that a sequence ends; it leaves unless others need the prompt that it computes."""
        self._metrics.finished[reason] += 1
        self._outlook.end(family.request, family.num_left(index), failed=reason is FinishReason.FAILED)
        if index in family.unforked:
            family.unforked.discard(index)
            if not family.unforked:
                self._dismiss_leader(family)
        else:
            sequence = family.live.pop(index)
            sequence.finish_reason = reason
            if sequence.has_left:
                self._leave(sequence)
        if not (family.live or family.unforked):
            del self._families[family.request_id]

    def take_back(self, sequence: Sequence) -> None:
        """The cells of a sequence that has left, as soon as no step in flight holds them."""
        if sequence.cells_id is None:
            self._memory.discard_copy(sequence)
        elif sequence.has_left and not sequence.num_in_flight:
            self._memory.retire(sequence, reusable=sequence.finish_reason is not FinishReason.FAILED)

    def check(self) -> None:
        """Verify every invariant; for tests and debugging."""
        self._outlook.check((family.request, family.num_left(index)) for family in self for index in family.indices)
        assert bool(self._families) == self._schedule.busy, "a family without a sequence, or the reverse"

    def _dismiss_leader(self, family: Family) -> None:
        """Nobody waits to fork any more: a leader that had ended leaves."""
        leader, family.leader = family.leader, None
        if leader is not None and leader.has_left:
            self._leave(leader)

    def _leave(self, sequence: Sequence) -> None:
        self._schedule.remove(sequence)
        self.take_back(sequence)

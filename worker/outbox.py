"""What one gateway has not been sent yet. Owner: the event loop.

When the gateway reads slower than the engine steps, the news of one sequence merge into one update: what waits is
bounded by the sequences and their budgets, not by the number of steps. The transport would not tell: it buffers
megabytes. So the gateway says what it has read, and nothing is sent while `MAX_UNREAD_MESSAGES` are not.
"""

from __future__ import annotations

import asyncio

from planner.blocks import BlockNews
from planner.errors import InvalidRequest, RequestRefused
from planner.limits import Snapshot
from planner.request import Adapter, Update
from protos import worker_pb2 as pb
from worker import wire
from worker.client import StepReport
from worker.totals import Totals
from worker.wire_totals import totals_to_proto

MAX_UNREAD_ENDS = 4096
"""While a gateway leaves more ends than this unread, its commands are not read: it cannot pile them up."""

MAX_UNREAD_MESSAGES = 2
"""One is being read while the next is on its way."""

MAX_BLOCKS_IN_MESSAGE = 4096
"""Names of prefixes, of each kind, in one message: a new gateway gets them in pieces, with tokens in between."""


class Outbox:
    """Takes reports in, and gives out one message at a time that holds all there is."""

    def __init__(self) -> None:
        self._open: dict[int, set[int]] = {}  # sequences whose end was not given out
        self._newest_request = 0
        self._updates: dict[tuple[int, int], Update] = {}
        self._refusals: list[tuple[int, RequestRefused]] = []
        self._snapshot: pb.Snapshot | None = None
        self._blocks = BlockNews()
        self._totals: Totals | None = None
        self._adapters: tuple[Adapter, ...] | None = None
        self._num_unread_ends = 0
        self._num_unread_messages = 0
        self._num_sent = 0
        self._engine_spoke = False
        self._engine_spoke_since_beat = False
        self._is_sending = False
        self._finished = False
        self._hung_up = False
        self._news = asyncio.Event()
        self._may_send = asyncio.Event()
        self._may_send.set()
        self._all_read = asyncio.Event()
        self._all_read.set()
        self._room = asyncio.Event()
        self._room.set()

    @property
    def is_idle(self) -> bool:
        """No request is open and everything was sent."""
        return not (self._open or self._updates or self._refusals or self._is_sending)

    def note_new(self, request_id: int) -> None:
        """A request has come: it is the newest. Raises `InvalidRequest` while the last news of one of this id were not
        given out."""
        self._newest_request = request_id
        if request_id in self._open:
            raise InvalidRequest(f"request {request_id} is already running on this stream", param="request_id")

    def open(self, request_id: int, n: int) -> None:
        self._open[request_id] = set(range(n))

    def refuse(self, request_id: int, refusal: RequestRefused) -> None:
        self._refusals.append((request_id, refusal))
        self._note_end()
        self._news.set()

    def add(self, report: StepReport, *, draining: bool, of_engine: bool = True) -> None:
        """`of_engine`: whether it is the engine that reports."""
        for request_id, news in report.updates:
            if isinstance(news, RequestRefused):
                for index in self._open.pop(request_id):  # it speaks for those that were cancelled, too
                    self._updates.pop((request_id, index), None)
                self.refuse(request_id, news)
            else:
                key = request_id, news.index
                before = self._updates.get(key)
                self._updates[key] = news if before is None else merged(before, news)
                if news.finish_reason is not None:
                    self._note_end()
        self._engine_spoke |= of_engine
        self.tell(report.snapshot, draining=draining)
        self._blocks.note(report.blocks)
        self._totals = report.totals or self._totals
        self._adapters = self._adapters if report.adapters is None else report.adapters

    def tell(self, snapshot: Snapshot, *, draining: bool) -> None:
        """Give out the worker's state of this moment, with every request that has come. Not the engine's word."""
        self._snapshot = wire.snapshot_to_proto(snapshot, draining=draining, newest_request=self._newest_request)
        self._news.set()

    def beat(self) -> None:
        """The engine gets on: if the gateway waits for it and was not told so since the last beat, tell it."""
        if self._open and not self._engine_spoke_since_beat:
            self._engine_spoke = True
            self._news.set()
        self._engine_spoke_since_beat = False

    def finish(self) -> None:
        """Give out what there is, wait for all of it to be read, and then give out nothing more."""
        self._finished = True
        self._news.set()
        self._note_credit()

    def hang_up(self) -> None:
        """The gateway says nothing more, not even what it reads: `finish` without waiting for that."""
        self._hung_up = True
        self.finish()

    def note_read(self, num_messages: int) -> None:
        """The gateway has read so many messages since the stream began."""
        self._num_unread_messages = self._num_sent - num_messages
        self._note_credit()

    async def wait_for_room(self) -> None:
        await self._room.wait()

    async def next(self) -> pb.StepUpdates | None:
        """Wait for news; all of them as one message, to be sent before the next call. None when there will be none."""
        await self._may_send.wait()
        await self._news.wait()
        if not self._finished:
            self._news.clear()
        elif self._snapshot is None and not self._refusals:
            # A gateway's transport drops what it has not handed over when the stream ends under one of its writes.
            await self._all_read.wait()
            return None
        message = pb.StepUpdates(snapshot=self._snapshot, beside_engine=not self._engine_spoke)
        self._engine_spoke_since_beat |= self._engine_spoke
        self._engine_spoke = False
        if self._totals is not None:
            message.totals.CopyFrom(totals_to_proto(self._totals))
        if self._adapters is not None:
            message.adapters.CopyFrom(pb.Adapters(adapters=map(wire.adapter_to_proto, self._adapters)))
        if self._blocks:
            message.blocks.CopyFrom(wire.blocks_to_proto(self._blocks.take(MAX_BLOCKS_IN_MESSAGE)))
        if self._blocks:
            self._news.set()
        for (request_id, index), update in self._updates.items():
            wire.write_update(message.updates.add(), request_id, update)
            if update.finish_reason is not None:
                self._close(request_id, index)
        for request_id, refusal in self._refusals:
            wire.write_update(message.updates.add(), request_id, refusal)
        self._updates, self._refusals, self._snapshot = {}, [], None
        self._totals, self._adapters = None, None
        self._num_unread_ends = 0
        self._is_sending = True
        self._num_sent += 1
        self._num_unread_messages += 1
        self._room.set()
        self._note_credit()
        return message

    def note_sent(self) -> None:
        self._is_sending = False

    def _note_end(self) -> None:
        self._num_unread_ends += 1
        if self._num_unread_ends > MAX_UNREAD_ENDS:
            self._room.clear()
            self._note_credit()

    def _note_credit(self) -> None:
        # While no command is read, no word of what was read gets through either: then the transport alone decides.
        may_send = self._num_unread_messages < MAX_UNREAD_MESSAGES or self._finished or not self._room.is_set()
        for event, holds in (
            (self._may_send, may_send),
            (self._all_read, self._hung_up or not self._num_unread_messages),
        ):
            if holds:
                event.set()
            else:
                event.clear()

    def _close(self, request_id: int, index: int) -> None:
        self._open[request_id].remove(index)
        if not self._open[request_id]:
            del self._open[request_id]


def merged(before: Update, after: Update) -> Update:
    """Two consecutive updates of one sequence as one."""
    return Update(
        request_id=after.request_id,
        index=after.index,
        tokens=before.tokens + after.tokens,
        logprobs=before.logprobs + after.logprobs,
        prompt_logprobs=before.prompt_logprobs + after.prompt_logprobs,
        num_cached_tokens=max(before.num_cached_tokens, after.num_cached_tokens),
        finish_reason=after.finish_reason,
        error=after.error,
        vector=after.vector,
    )

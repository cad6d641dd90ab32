"""What clients tell the engine: the one door through which other threads reach it. Bounded, and deaf to repetition.
So it is also what knows how much the engine has to do at any moment, those requests included that it has not seen yet.

Submits queue up to a size. Cancels and closes are never turned away: there is at most one cancel a live key, and one
close a client. A cancel that came while its submit was still queued is delivered together with it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

from planner.errors import InvalidRequest, QueueFull, Unavailable
from planner.limits import Snapshot
from planner.outlook import expected_answer_tokens
from planner.request import Request
from worker.adapters import AdapterOrder
from worker.inspection import EngineView

C = TypeVar("C")


class Unread(NamedTuple):
    """What requests ask for that the planner does not know yet: how many, tokens to prefill, and tokens expected."""

    num_requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def plus(self, other: Unread) -> Unread:
        return Unread(*map(operator.add, self, other))


@dataclass(frozen=True, slots=True)
class Submit(Generic[C]):
    client: C
    key: int
    request: Request


@dataclass(slots=True)
class Mail(Generic[C]):
    """All that came since the last look. To be applied in the order of the fields.

    `cancels` maps (client, key) to the indices to cancel, None for all; `recalls` are (client, key) in order. `looks`:
    who wants to see what the engine holds. `orders` are about adapters. `nudged`: the clients want to hear news.
    """

    connects: list[C] = field(default_factory=list)
    submits: list[Submit[C]] = field(default_factory=list)
    cancels: dict[tuple[C, int], frozenset[int] | None] = field(default_factory=dict)
    recalls: dict[tuple[C, int], None] = field(default_factory=dict)
    closes: list[C] = field(default_factory=list)
    looks: list[Future[EngineView]] = field(default_factory=list)
    orders: list[AdapterOrder] = field(default_factory=list)
    nudged: bool = False
    stopping: bool = False

    @property
    def has_news(self) -> bool:
        """Whether anything changes or is to be told."""
        told = self.connects or self.submits or self.cancels or self.recalls or self.closes or self.orders
        return bool(told or self.nudged or self.stopping)

    def __bool__(self) -> bool:
        return self.has_news or bool(self.looks)

    def give_up(self, why: Unavailable) -> None:
        """Tell those who asked something in it, and have no answer yet, that none comes."""
        questions: list[Future[Any]] = [*self.looks, *(order.done for order in self.orders)]
        for question in questions:
            if not question.done() and (question.running() or question.set_running_or_notify_cancel()):
                question.set_exception(why)


class Inbox(Generic[C]):
    """Owner: the engine, which alone calls `take`, `advise` and `forget`. Every other method may be called on any
    thread, returns at once, and may be called from inside a listener."""

    def __init__(self, size: int) -> None:
        """`size`: submits that may wait to be looked at."""
        self._size = size
        self._condition = threading.Condition()
        self._mail: Mail[C] = Mail()
        self._live: dict[C, set[int]] = {}
        self._refusing: str | None = None
        self._stopped = False
        self._retry_after_s = 1.0
        self._snapshot: Snapshot | None = None
        self._queued = Unread()
        self._taken = Unread()

    def connect(self, client: C) -> None:
        """Raises `Unavailable` once requests are refused."""
        with self._condition:
            self._check_open()
            self._live[client] = set()
            self._mail.connects.append(client)
            self._condition.notify()

    def submit(self, client: C, key: int, request: Request) -> None:
        """Raises `QueueFull`, `Unavailable`, or `InvalidRequest` for a key that is live. Nothing has then changed."""
        with self._condition:
            self._check_open()
            live = self._live.get(client)
            if live is None:
                raise Unavailable("this client is closed")
            if key in live:
                raise InvalidRequest(f"request {key} is already running", param="request_id")
            if len(self._mail.submits) >= self._size:
                raise QueueFull(
                    f"the worker's inbox holds {self._size} requests already", retry_after_s=self._retry_after_s
                )
            live.add(key)
            self._mail.submits.append(Submit(client, key, request))
            ends_per_token = 0.0 if self._snapshot is None else self._snapshot.ends_per_token
            self._queued = self._queued.plus(
                Unread(1, len(request.prompt), expected_answer_tokens(request, ends_per_token))
            )
            self._condition.notify()

    def cancel(self, client: C, key: int, indices: Collection[int] | None) -> None:
        """Harmless for a key that has ended or never was."""
        with self._condition:
            if key not in self._live.get(client, ()):
                return
            before = self._mail.cancels.get((client, key), frozenset())
            both = None if indices is None or before is None else before | frozenset(indices)
            self._mail.cancels[client, key] = both
            self._condition.notify()

    def recall(self, client: C, key: int) -> None:
        """Have a request refused that has not begun. Harmless for any other key."""
        with self._condition:
            if key in self._live.get(client, ()):
                self._mail.recalls[client, key] = None
                self._condition.notify()

    def close(self, client: C) -> None:
        """Harmless the second time."""
        with self._condition:
            if self._live.pop(client, None) is not None:
                self._mail.closes.append(client)
                self._condition.notify()

    def look(self, view: Future[EngineView]) -> None:
        """Have `view` filled between two turns, unless it is cancelled before. Raises `Unavailable` once stopped, as
        `view` does when the engine dies."""
        with self._condition:
            if self._stopped:
                self._check_open()
            self._mail.looks.append(view)
            self._condition.notify()

    def order(self, order: AdapterOrder) -> None:
        """Have an adapter loaded or unloaded between two turns, unless `order.done` is cancelled before. Raises
        `Unavailable` once stopped, as `order.done` does when the engine dies."""
        with self._condition:
            if self._stopped:
                self._check_open()
            self._mail.orders.append(order)
            self._condition.notify()

    def refuse(self, why: str) -> None:
        """From now on submits and connects raise `Unavailable(why)`; what is queued stays. Clients get a report."""
        with self._condition:
            if not self._stopped:
                self._refusing = why
            self._mail.nudged = True
            self._condition.notify()

    def stop(self, why: str) -> None:
        """As `refuse`, and have the engine end. The first reason stays."""
        with self._condition:
            if not self._stopped:
                self._refusing = why
            self._stopped = self._mail.stopping = True
            self._condition.notify()

    def take(self, *, wait: bool) -> Mail[C]:
        """All mail; with `wait`, blocks until there is some."""
        with self._condition:
            while wait and not self._mail:
                self._condition.wait()
            mail, self._mail = self._mail, Mail()
            self._taken, self._queued = self._taken.plus(self._queued), Unread()
            return mail

    def advise(self, retry_after_s: float, snapshot: Snapshot) -> None:
        """What to tell those that are turned away while the inbox is full, and the planner's state with all mail that
        was taken."""
        with self._condition:
            self._retry_after_s = retry_after_s
            self._snapshot, self._taken = snapshot, Unread()

    @property
    def snapshot(self) -> Snapshot | None:
        """The planner's last state, and on top of it every request that was submitted since; None before the first."""
        with self._condition:
            snapshot, unread = self._snapshot, self._taken.plus(self._queued)
        if snapshot is None or not unread.num_requests:
            return snapshot
        return replace(
            snapshot,
            num_waiting=snapshot.num_waiting + unread.num_requests,
            queued_prefill_tokens=snapshot.queued_prefill_tokens + unread.prompt_tokens,
            answer_tokens=snapshot.answer_tokens + unread.answer_tokens,
        )

    def live(self) -> list[tuple[C, int]]:
        """Keys that were submitted and have not had their last news, of clients that are not closed."""
        with self._condition:
            return [(client, key) for client, keys in self._live.items() for key in keys]

    @property
    def num_live(self) -> int:
        with self._condition:
            return sum(map(len, self._live.values()))

    def forget(self, ended: Iterable[tuple[C, int]]) -> None:
        """These keys have had their last news: they may be submitted again, and cancels for them mean nothing."""
        with self._condition:
            for client, key in ended:
                self._live.get(client, set()).discard(key)
                self._mail.cancels.pop((client, key), None)
                self._mail.recalls.pop((client, key), None)

    def _check_open(self) -> None:
        if self._refusing is not None:
            raise Unavailable(self._refusing)

"""The engine's books: which client asked for what under which key, and the news that wait to be reported.

Owner: the engine thread. Not for decisions: the planner makes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from planner.errors import RaycombError, RequestRefused
from planner.request import FinishReason, Update

C = TypeVar("C")
News = tuple[int, Update | RequestRefused]


@dataclass(slots=True)
class _Open(Generic[C]):
    """A request that the planner accepted; `indices` of its sequences have not ended."""

    client: C
    key: int
    indices: set[int]


class Desk(Generic[C]):
    def __init__(self) -> None:
        self._open: dict[int, _Open[C]] = {}
        self._ids: dict[C, dict[int, int]] = {}
        self._news: dict[C, list[News]] = {}
        self._ended: list[tuple[C, int]] = []

    def connect(self, client: C) -> None:
        self._ids[client] = {}
        self._news[client] = []

    def disconnect(self, client: C) -> None:
        """Its news are thrown away. Its requests must have ended."""
        assert not self._ids.pop(client)
        del self._news[client]

    def request_ids(self, client: C) -> list[int]:
        return list(self._ids[client].values())

    def request_id(self, client: C, key: int) -> int | None:
        """The planner's id, while any of the request's sequences has not ended."""
        return self._ids.get(client, {}).get(key)

    def accept(self, client: C, key: int, request_id: int, n: int) -> None:
        self._open[request_id] = _Open(client, key, set(range(n)))
        self._ids[client][key] = request_id

    def refuse(self, client: C, key: int, refusal: RequestRefused) -> None:
        self._news[client].append((key, refusal))
        self._ended.append((client, key))

    def give_back(self, request_id: int, refusal: RequestRefused) -> None:
        """An accepted request of which nothing was told is refused after all."""
        opened = self._open.pop(request_id)
        del self._ids[opened.client][opened.key]
        self.refuse(opened.client, opened.key, refusal)

    def note(self, updates: Iterable[Update]) -> None:
        """Put updates on their clients' next reports, and close the books of what they end."""
        for update in updates:
            opened = self._open[update.request_id]
            self._news[opened.client].append((opened.key, update))
            if update.finish_reason is not None:
                opened.indices.remove(update.index)
                if not opened.indices:
                    del self._open[update.request_id]
                    del self._ids[opened.client][opened.key]
                    self._ended.append((opened.client, opened.key))

    def fail_all(self, error: RaycombError) -> None:
        """End every open sequence as FAILED, without asking the planner."""
        self.note(
            [
                Update(request_id=request_id, index=index, finish_reason=FinishReason.FAILED, error=error)
                for request_id, opened in self._open.items()
                for index in sorted(opened.indices)
            ]
        )

    def take(self) -> tuple[list[tuple[C, tuple[News, ...]]], list[tuple[C, int]]]:
        """What to tell every client (some have no news), and the keys that had their last news."""
        reports = [(client, tuple(news)) for client, news in self._news.items()]
        ended = self._ended
        self._news = {client: [] for client in self._news}
        self._ended = []
        return reports, ended

"""How an answer is told over HTTP: as one JSON text, or as the server-sent events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from cluster.answers.answer import TokenCounts
from cluster.answers.choice import Piece
from cluster.errors import envelope
from cluster.web.voices import Voice
from planner.errors import RaycombError


class Telling(Protocol):
    """Owner: one answer. Every method gives bytes that are ready to be sent."""

    def events(self, pieces: Iterable[Piece]) -> bytes:
        """Events that tell of these pieces; there may be none."""
        ...

    def closing(self, counts: TokenCounts) -> bytes:
        """The events that end a stream whose answer has ended well."""
        ...

    def failure(self, error: RaycombError) -> bytes:
        """The events that end a stream which has begun and cannot go on."""
        ...

    def whole(self, choices: Sequence[Sequence[Piece]], counts: TokenCounts) -> bytes:
        """The answer at once: all pieces of every choice, in order."""
        ...


class ChunkTelling:
    """A `Telling`, as completions and chats have it: chunks without a name, and `[DONE]` behind the last of them.
    `counts_so_far`: what each chunk tells of the token counts."""

    def __init__(
        self, voice: Voice, *, include_usage: bool, counts_so_far: Callable[[], TokenCounts] | None = None
    ) -> None:
        self._voice = voice
        self._include_usage = include_usage
        self._counts_so_far = counts_so_far

    def events(self, pieces: Iterable[Piece]) -> bytes:
        counts = None if self._counts_so_far is None else self._counts_so_far()
        chunks = (self._voice.chunk(piece, counts) for piece in pieces)
        return b"".join(event(chunk) for chunk in chunks if chunk is not None)

    def closing(self, counts: TokenCounts) -> bytes:
        usage = event(self._voice.usage_chunk(counts)) if self._include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def failure(self, error: RaycombError) -> bytes:
        return event(json.dumps(envelope(error), ensure_ascii=False).encode())

    def whole(self, choices: Sequence[Sequence[Piece]], counts: TokenCounts) -> bytes:
        return self._voice.whole(choices, counts)


def event(data: bytes, name: str | None = None) -> bytes:
    """One server-sent event. `data` is JSON on one line."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"

"""A light HTTP client for one thing: POST a JSON body and time the server-sent events that come back.

It exists because a load generator shares its machine with what it measures: on two cores an event cost 135 us of
processor time through httpx, 53 us through aiohttp and 23 us here. It speaks HTTP/1.1 with one connection a request,
and knows no redirects, proxies or compression. Not for anything but measuring.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from planner.errors import InvalidConfiguration

MAX_HEAD_BYTES = 64 * 1024
READ_BYTES = 64 * 1024


class HttpError(Exception):
    """The server answered with something else than a stream, or broke off within one."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. `base_url` has scheme, host and perhaps port and a path prefix."""

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None

    @classmethod
    def parse(cls, base_url: str) -> Target:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfiguration(f"a base URL looks like http://host:port, not {base_url!r}", param="base_url")
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls)

    @property
    def authority(self) -> str:
        """Host and port as a Host header has them: an IPv6 address stands in brackets (RFC 3986, section 3.2.2)."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ChunkedBody:
    """Takes the chunk framing off a body (RFC 9112, section 7.1), however the bytes were cut on their way."""

    def __init__(self) -> None:
        self._rest = b""
        self._left = 0  # bytes of the running chunk still to come, with its closing CRLF
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        self._rest += data
        out: list[bytes] = []
        while not self.ended:
            if self._left == 0:
                line, found, rest = self._rest.partition(b"\r\n")
                if not found:
                    break
                size = int(line.split(b";")[0], 16)
                self._rest, self._left, self.ended = rest, size + 2, size == 0
                continue
            if len(self._rest) < self._left:
                break
            out.append(self._rest[: self._left - 2])
            self._rest, self._left = self._rest[self._left :], 0
        return b"".join(out)


class EventLines:
    """Cuts a body into the payloads of its `data:` lines; other lines of server-sent events are passed over."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Payloads of events that came with one read. `at` is `time.perf_counter()` when they came."""

    at: float
    payloads: tuple[bytes, ...]


async def post_events(
    target: Target, path: str, body: object, headers: Mapping[str, str] | None = None
) -> AsyncGenerator[Arrival, None]:
    """Send `body` as JSON and yield events until `[DONE]` (which is not yielded).

    Raises `HttpError` for a status other than 200, with the body's start, and for a stream that ends early; `OSError`
    when there is no connection.
    """
    content = json.dumps(body).encode()
    fields = {
        "host": target.authority,
        "content-type": "application/json",
        "accept": "text/event-stream",
        "content-length": str(len(content)),
        "connection": "close",
        **(headers or {}),
    }
    lines = [f"POST {target.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    async with _connection(target) as (reader, writer):
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + content)
        await writer.drain()
        status, chunked = await _read_head(reader)
        if status != 200:
            text = await reader.read(READ_BYTES)
            raise HttpError(f"status {status}: {text.decode(errors='replace').strip()[:500]}")
        framing = ChunkedBody() if chunked else None
        events = EventLines()
        while data := await reader.read(READ_BYTES):
            at = time.perf_counter()
            payloads = events.feed(framing.feed(data) if framing else data)
            if payloads and payloads[-1] == b"[DONE]":
                if payloads[:-1]:
                    yield Arrival(at, tuple(payloads[:-1]))
                return
            if payloads:
                yield Arrival(at, tuple(payloads))
        raise HttpError("the stream ended before [DONE]")


@asynccontextmanager
async def _connection(target: Target) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=target.tls, limit=MAX_HEAD_BYTES)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body is chunked."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as fault:
        raise HttpError("the server closed the connection without an answer") from fault
    status_line, *lines = head.decode("latin-1").split("\r\n")
    fields = {name.strip().lower(): value.strip().lower() for name, _, value in (line.partition(":") for line in lines)}
    words = status_line.split()
    if len(words) < 2 or not words[1].isdigit():
        raise HttpError(f"not an HTTP answer: {status_line[:100]!r}")
    return int(words[1]), fields.get("transfer-encoding") == "chunked"

"""What stands before Serve's own reading of a request: headers that Serve would stumble over, or obey."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cluster.serving.http_front import MAX_HEADER_BYTES, HeaderGuard, has_left, middlewares
from tests.listening import eventually, listening


class Seen:
    """Stands for Serve: keeps the headers that it is given."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = scope["headers"]
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def asked(*headers: tuple[bytes, bytes]) -> tuple[int, list[tuple[bytes, bytes]] | None]:
    """The status, and what Serve saw."""
    seen, sent = Seen(), []

    async def receive() -> Any:
        raise AssertionError("no body is read")

    async def send(message: Message) -> None:
        sent.append(message)

    (made,) = middlewares()
    assert made.cls is HeaderGuard
    await HeaderGuard(seen)({"type": "http", "headers": list(headers)}, receive, send)
    return sent[0]["status"], seen.headers


async def test_usual_headers_pass_as_they_are() -> None:
    usual = ((b"x-request-id", b"mine"), (b"x-session-id", b"s1"), (b"x-tenant", "é".encode()))
    assert await asked(*usual) == (200, list(usual))


@pytest.mark.parametrize(
    "name",
    [
        b"x-request-disconnect-disabled",
        b"x-request-timeout-seconds",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
    ],
)
async def test_clients_give_no_orders_to_serve(name: bytes) -> None:
    assert await asked((name, b"?1"), (b"host", b"a")) == (200, [(b"host", b"a")])


async def test_an_id_that_is_no_text_is_none_and_a_session_that_is_none_is_refused() -> None:
    assert await asked((b"x-request-id", b"\xff")) == (200, [])
    assert await asked((b"x-session-id", b"\xff")) == (400, None)


async def test_nothing_is_done_for_a_client_that_hung_up_behind_its_request() -> None:
    """With uvicorn, whose word on it is read from where it keeps it."""
    seen, arrived = Seen(), asyncio.Event()

    class Arrivals:
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            writer.transport.abort()
            arrived.set()
            await eventually(lambda: has_left(receive))
            await HeaderGuard(seen)(scope, receive, send)
            ended.set()

    ended = asyncio.Event()
    async with listening(Arrivals()) as url:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rstrip("/").rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
        async with asyncio.timeout(10):
            await arrived.wait()
            await ended.wait()
    assert seen.headers is None


async def test_more_headers_than_anybody_needs_are_refused() -> None:
    value = b"y" * (MAX_HEADER_BYTES - 1)
    assert (await asked((b"x", value)))[0] == 200
    assert await asked((b"x", value), (b"z", b"")) == (431, None)

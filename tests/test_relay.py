"""A wire that can be cut, for tests of what nobody is told of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from benchmarks.relay import Relay, relay_to


@asynccontextmanager
async def echo_behind_a_relay() -> AsyncIterator[tuple[Relay, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A relay to a server that says what it is told, and a connection through it."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with server, relay_to("{}:{}".format(*server.sockets[0].getsockname())) as relay:
        host, _, port = relay.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield relay, reader, writer
        finally:
            writer.close()


async def test_nothing_passes_a_cut_and_all_of_it_once_it_is_mended() -> None:
    async with echo_behind_a_relay() as (relay, reader, writer):
        writer.write(b"one")
        assert await asyncio.wait_for(reader.readexactly(3), 5) == b"one"
        relay.cut()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(3), 0.2)
        relay.mend()
        assert await asyncio.wait_for(reader.readexactly(3), 5) == b"two"


async def test_a_close_passes_a_whole_wire_and_no_cut_one() -> None:
    async with echo_behind_a_relay() as (relay, reader, writer):
        relay.cut()
        writer.write_eof()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 0.2)
        relay.mend()
        assert await asyncio.wait_for(reader.read(), 5) == b""

"""A wire that can be cut: what is sent to its address arrives at another one, until nothing does any more.

A cut is not a close: neither end hears of it, as when a cable is pulled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

READ_BYTES = 2**16
CLOSING_S = 0.05


class Relay:
    """Owner: `relay_to`. `address` is where its near end listens."""

    def __init__(self, far_address: str) -> None:
        host, _, port = far_address.rpartition(":")
        self._far = host, int(port)
        self._whole = asyncio.Event()
        self._whole.set()
        self.address = ""

    def cut(self) -> None:
        """From now on nothing passes, in either direction."""
        self._whole.clear()

    def mend(self) -> None:
        """All passes again, what was on its way as well."""
        self._whole.set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until either end closes it. Does not close `writer`."""
        await self._whole.wait()
        far_reader, far_writer = await asyncio.open_connection(*self._far)
        pumps = [
            asyncio.create_task(self._pump(reader, far_writer)),
            asyncio.create_task(self._pump(far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(READ_BYTES):
                await self._whole.wait()
                writer.write(data)
                await writer.drain()
            await self._whole.wait()  # not even an end passes a cut


@asynccontextmanager
async def relay_to(far_address: str) -> AsyncIterator[Relay]:
    """A relay while the block lasts."""
    relay = Relay(far_address)
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay.connect(reader, writer))
        connections.add(task)

        def ended(_: asyncio.Task[None]) -> None:  # also of a task that was cancelled before it began
            connections.discard(task)
            writer.transport.abort()

        task.add_done_callback(ended)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    relay.address = f"{host}:{port}"
    try:
        yield relay
    finally:
        server.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(CLOSING_S)  # what was aborted is closed in the loop's next turns

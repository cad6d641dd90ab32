"""Clients that are slow or gone without a word: connections that cost a service something for as long as it lets them.

Not for what they say, which is all right as far as it comes: `benchmarks.hostile_requests` is.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from enum import Enum
from typing import Final

DRIP_S: Final = 1.0
"""Between two bytes of a slow client."""

BODY: Final = json.dumps({"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "stream": True}).encode()
HEAD: Final = (
    b"POST /v1/completions HTTP/1.1\r\nhost: service\r\ncontent-type: application/json\r\n"
    b"x-request-timeout-ms: 60000\r\ncontent-length: %d\r\n\r\n" % len(BODY)
)


class Manner(Enum):
    """What is wrong with a client."""

    SLOW_HEAD = "sends its headers a byte at a time"
    SLOW_BODY = "sends its body a byte at a time"
    HALF_HEAD = "stops in the middle of its headers"
    HALF_BODY = "stops in the middle of its body"
    HALF_CLOSED = "closes its sending half behind its request"
    DEAF = "never reads its answer"
    IDLE = "says nothing at all"


@asynccontextmanager
async def hostile_connections(host: str, port: int, count: int, seed: int) -> AsyncIterator[list[Manner]]:
    """`count` of them, in all manners evenly, each opened anew a second after the service has closed it; gone
    with the block."""
    manners = [list(Manner)[number % len(Manner)] for number in range(count)]
    chance = random.Random(seed)
    tasks = [asyncio.create_task(_again(host, port, manner, chance.random() * DRIP_S)) for manner in manners]
    try:
        yield manners
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again(host: str, port: int, manner: Manner, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    while True:
        with suppress(OSError):
            await behave(host, port, manner)
        await asyncio.sleep(DRIP_S)  # one that is turned away at once would be a flood otherwise


async def behave(host: str, port: int, manner: Manner) -> bytes:
    """One connection in this manner, until the service ends it; what it said."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        match manner:
            case Manner.SLOW_HEAD:
                await _drip(writer, HEAD + BODY)
            case Manner.SLOW_BODY:
                writer.write(HEAD)
                await _drip(writer, BODY)
            case Manner.HALF_HEAD:
                writer.write(HEAD[: len(HEAD) // 2])
            case Manner.HALF_BODY:
                writer.write(HEAD + BODY[: len(BODY) // 2])
            case Manner.HALF_CLOSED:
                writer.write(HEAD + BODY)
                writer.write_eof()
            case Manner.DEAF:
                writer.write(HEAD + BODY)
                await writer.drain()
                await asyncio.sleep(10 * DRIP_S)
                return b""
            case Manner.IDLE:
                pass
        return await reader.read()
    finally:
        writer.close()


async def _drip(writer: asyncio.StreamWriter, data: bytes) -> None:
    for at in range(len(data)):
        writer.write(data[at : at + 1])
        await writer.drain()
        await asyncio.sleep(DRIP_S)

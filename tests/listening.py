"""An application at a real port of this machine, and patience with what tells nobody that it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from tests.ports import own_ports


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[str]:
    """The application at a free port of this machine; gives its address."""
    (port,) = own_ports(1)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", lifespan="off", ws="none")
    )
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        await serving


async def eventually(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Until `condition`, which may be a coroutine, gives something true."""
    async with asyncio.timeout(seconds):
        while True:
            value = condition()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return
            await asyncio.sleep(0.05)

"""A gateway in the caller's own process, without Serve: the real HTTP application and the real streams to workers.

For what Serve keeps out of reach: workers at addresses that they did not publish, and the gateway's own objects.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import uvicorn

from cluster.answers.maker import Service
from cluster.api_settings import ApiSettings
from cluster.checkpoints import resolve
from cluster.language.text import load_text
from cluster.models import single
from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from cluster.web.api import create_app

READY_WITHIN_S = 30.0


@asynccontextmanager
async def bare_gateway(
    model: str, model_name: str, secret: str, addresses: Mapping[str, str], router: Router | None = None
) -> AsyncIterator[str]:
    """The base URL of a gateway to the workers at `addresses` (by worker id), whose streams are all open."""
    router = router or Router(max_waiting=2048)
    limits = FailoverLimits(timeout_s=240.0, max_failovers=50)
    streams = Streams(model_name, secret, router, limits)
    streams.set_members({worker_id: Member(worker_id, address) for worker_id, address in addresses.items()})
    text = await asyncio.to_thread(lambda: load_text(resolve(model)))
    models = single(Service(streams, text, ApiSettings(served_model_names=(model_name,))))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(create_app(models), log_level="warning", lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        try:
            async with asyncio.timeout(READY_WITHIN_S):
                while not server.started or len(router.infos) < len(addresses):  # noqa: ASYNC110 - no event for it
                    await asyncio.sleep(0.02)
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
            await streams.close()

"""Every query of the dashboard, answered by a real Prometheus that scrapes a running service."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from benchmarks.storm_service import MODEL_NAME, WORKER, StormedService
from tests.prometheus_server import ask, needs_prometheus, panel_queries, prometheus

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(240)]

BODY = {"model": MODEL_NAME, "prompt": "hello, hello", "max_tokens": 20, "n": 2, "ignore_eos": True}


async def traffic(client: httpx.AsyncClient) -> None:
    """Requests that end in several ways, one after the other."""
    await client.post("/v1/completions", json=BODY)
    await client.post("/v1/completions", json=BODY | {"temperature": -1})
    await client.post("/v1/completions", json=BODY | {"max_tokens": 500}, headers={"x-request-timeout-ms": "200"})
    try:
        await client.post("/v1/completions", json=BODY | {"max_tokens": 500}, timeout=0.3)
    except httpx.TimeoutException:
        return  # that one left


@needs_prometheus
async def test_every_query_of_the_dashboard_finds_something_at_a_running_service(
    stormed_service: StormedService, tmp_path: Path
) -> None:
    service = stormed_service.process
    queries = [query.replace("$__rate_interval", "30s").replace("$model", ".*") for query in panel_queries()]
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=60, trust_env=False) as client,
        prometheus(tmp_path, service.url.removeprefix("http://")) as server,
        httpx.AsyncClient(base_url=server, trust_env=False) as asking,
    ):
        deadline = asyncio.get_running_loop().time() + 90
        running = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 300}))
        await asyncio.sleep(2)
        for victim in service.processes(WORKER)[:2]:  # one of them runs something
            victim.kill()
        missing = list(queries)
        while missing and asyncio.get_running_loop().time() < deadline:
            await traffic(client)
            answers = [await ask(asking, query) for query in missing]
            missing = [query for query, found in zip(missing, answers, strict=True) if not found]
            await asyncio.sleep(0.5)
        assert (await running).status_code == 200
        assert missing == []
        # Two gateways answer the scrapes in turn, and at a moment there is what the last one told.
        assert await ask(asking, "sum(max_over_time(raycomb_workers_lost_total[2m])) >= 1")
        assert await ask(asking, "sum(max_over_time(raycomb_generation_tokens_total[2m])) > 300")

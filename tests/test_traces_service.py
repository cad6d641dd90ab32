"""The trace of a request of a real service, whose worker is killed in the middle of its answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx
import pytest

from benchmarks.storm_service import MODEL_NAME, StormedService
from tests.listening import eventually
from tests.otlp_collector import Collector, ToldSpan
from tests.sse_events import events_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

NUM_TOKENS = 150


def named(spans: list[ToldSpan], name: str) -> list[ToldSpan]:
    return [span for span in spans if span.name == name]


async def test_the_trace_of_a_killed_worker_s_request_names_both_workers(
    stormed_service: StormedService, storm_collector: Collector
) -> None:
    trace_id = os.urandom(16).hex()
    body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01", "x-request-id": f"request-{trace_id}"}

    def spans(name: str) -> list[ToldSpan]:
        return named(storm_collector.trace(trace_id), name)

    async with httpx.AsyncClient(base_url=stormed_service.process.url, timeout=60, trust_env=False) as client:

        async def ask() -> int:
            async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                return sum([bool(event["choices"][0]["text"]) async for event in events_of(answer)])

        asking = asyncio.create_task(ask())
        await eventually(lambda: spans("prefill"))
        (first,) = spans("prefill")
        os.kill(first.pid, signal.SIGKILL)
        assert await asking > 0
    await eventually(lambda: spans("POST /v1/completions"), 20)
    await eventually(lambda: spans("decode"), 20)
    (server,) = spans("POST /v1/completions")
    assert server.service == "raycomb-gateway"
    assert server.attributes["gen_ai.usage.output_tokens"] == NUM_TOKENS
    lost, other = spans("run")
    assert lost.attributes["raycomb.worker"] == first.instance
    assert (lost.attributes["raycomb.outcome"], other.attributes["raycomb.outcome"]) == ("lost", "ended")
    assert other.events == ("failover",)
    (decoded,) = spans("decode")
    assert decoded.instance == other.attributes["raycomb.worker"] != first.instance
    assert (first.parent_id, decoded.parent_id) == (lost.span_id, other.span_id)
    assert lost.parent_id == other.parent_id == server.span_id
    lines = stormed_service.process.logged(f"request-{trace_id}")
    assert not [line for line in lines if "hello" in line]
    (told,) = [json.loads(line) for line in lines if line.startswith("{")]
    assert (told["trace_id"], told["status"], told["tokens"]) == (trace_id, 200, NUM_TOKENS)

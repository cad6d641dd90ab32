"""Traces of requests, as a real collector's stub receives them over OTLP from real exporters."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.config import ServiceConfig, service_config
from cluster.routing.failover import FailoverLimits
from cluster.routing.membership import Member
from cluster.routing.router import Router
from cluster.routing.streams import Streams
from cluster.telemetry.otlp_settings import with_otlp_of
from planner.errors import InvalidConfiguration, QueueFull
from tests.data_plane import SECRET, Worker, serving
from tests.fake_fleet import FakeFleet
from tests.fakes import FakeExecutor, fake_info
from tests.grpc_desk import grpc_desk
from tests.http_desk import MODEL, PROMPT, VOCAB, RawClient, desk, says, until
from tests.otlp_collector import Collector, ToldSpan, grpc_collector, http_collector
from worker.tracing import Protocol, Tracing, open_tracing

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with grpc_collector() as collector:
        yield collector


class Fleet:
    """Two workers with engines, a gateway's streams to them, and the tracing of all three processes."""

    def __init__(self, collector: Collector, streams: Streams, workers: dict[str, Worker]) -> None:
        self.collector = collector
        self.streams = streams
        self.workers = workers

    async def die(self, worker_id: str) -> None:
        """Its streams are cut where they are."""
        await self.workers[worker_id].server.stop(0)

    def busy(self) -> str:
        """The id of the worker that runs something."""
        return next(name for name, each in self.workers.items() if each.engine.snapshot.num_running)


@asynccontextmanager
async def traced_fleet(collector: Collector, tracer: Any, closing: ExitStack, **limits: Any) -> AsyncIterator[Fleet]:
    """`closing` sends what workers have recorded, once they have ended."""

    def worker(name: str) -> Any:
        tracing = open_tracing(collector.url, "grpc", "raycomb-worker", name)
        closing.callback(tracing.close)
        info = fake_info(vocab_size=VOCAB, context=MODEL.context)
        executor = FakeExecutor(info, step_time_s=0.01)
        return serving(executor, worker_id=name, tracer=tracing.tracer, **limits)

    streams = Streams("tiny", SECRET, Router(max_waiting=100), FailoverLimits(), tracer=tracer)
    async with worker("a") as first, worker("b") as second:
        streams.set_members({"a": Member("a", first.address), "b": Member("b", second.address)})
        await until(lambda: len(streams._router.infos) == 2)
        try:
            yield Fleet(collector, streams, {"a": first, "b": second})
        finally:
            await streams.close()


def gateway_tracing(collector: Collector, protocol: Protocol = "grpc") -> Tracing:
    return open_tracing(collector.url, protocol, "raycomb-gateway", "gateway-1")


def named(spans: list[ToldSpan], name: str) -> list[ToldSpan]:
    return [span for span in spans if span.name == name]


async def failed_over(collector: Collector, *, headers: dict[str, str]) -> list[ToldSpan]:
    """The spans of one request whose worker was lost in the middle of its answer, and which came to its end."""
    with ExitStack() as closing:
        tracing = gateway_tracing(collector)
        closing.callback(tracing.close)
        async with (
            traced_fleet(collector, tracing.tracer, closing) as fleet,
            desk(fleet=fleet.streams, tracer=tracing.tracer) as d,
        ):
            body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}
            asking = asyncio.create_task(d.http.post("/v1/completions", json=body, headers=headers))
            await until(lambda: any(each.engine.metrics.num_tokens_generated > 3 for each in fleet.workers.values()))
            await fleet.die(fleet.busy())
            answer = await asking
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 40
    return collector.spans


async def test_a_failed_over_request_is_one_trace_with_both_workers_in_it(collector: Collector) -> None:
    spans = await failed_over(collector, headers=CLIENT)
    assert {span.trace_id for span in spans} == {TRACE_ID}
    (server,) = named(spans, "POST /v1/completions")
    assert server.parent_id == PARENT_ID
    lost, other = sorted(named(spans, "run"), key=lambda span: span.started_at)
    assert {lost.attributes["raycomb.worker"], other.attributes["raycomb.worker"]} == {"a", "b"}
    assert lost.parent_id == other.parent_id == server.span_id
    assert (lost.attributes["raycomb.outcome"], lost.failed, lost.events) == ("lost", True, ("worker_lost",))
    assert (other.attributes["raycomb.outcome"], other.failed, other.events) == ("ended", False, ("failover",))
    assert lost.ended_at <= other.started_at
    for run in (lost, other):
        phases = [span for span in spans if span.parent_id == run.span_id]
        assert {span.instance for span in phases} == {run.attributes["raycomb.worker"]}
        assert [span.name for span in sorted(phases, key=lambda span: span.ended_at)] == ["queue", "prefill", "decode"]
        assert {span.service for span in phases} == {"raycomb-worker"}
    (_, decoded) = sorted(named(spans, "decode"), key=lambda span: span.ended_at)
    assert decoded.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < decoded.attributes["gen_ai.usage.output_tokens"] < 40
    assert server.attributes["gen_ai.usage.output_tokens"] == 40


async def test_a_request_that_names_no_parent_begins_a_trace(collector: Collector) -> None:
    spans = await failed_over(collector, headers={"x-request-id": "mine"})
    assert len({span.trace_id for span in spans}) == 1
    (server,) = named(spans, "POST /v1/completions")
    assert server.parent_id == ""
    told = server.attributes
    assert (told["gen_ai.request.id"], told["gen_ai.request.model"], told["http.response.status_code"]) == (
        "mine",
        "tiny",
        200,
    )
    assert 0 < told["gen_ai.server.time_to_first_token"] < told["gen_ai.server.request.duration"]


async def test_what_the_client_does_not_sample_is_recorded_nowhere(collector: Collector) -> None:
    assert await failed_over(collector, headers=UNSAMPLED) == []


async def test_preemptions_are_events_of_the_phase_that_they_break(collector: Collector) -> None:
    with ExitStack() as closing:
        tracing = open_tracing(collector.url, "grpc", "raycomb-worker", "a")
        closing.callback(tracing.close)
        gateway = gateway_tracing(collector)
        closing.callback(gateway.close)
        executor = FakeExecutor(fake_info(vocab_size=VOCAB, num_cells=64, context=64), step_time_s=0.001)
        streams = Streams("tiny", SECRET, Router(max_waiting=100), tracer=gateway.tracer)
        async with serving(executor, worker_id="a", tracer=tracing.tracer) as worker:
            streams.set_members({"a": Member("a", worker.address)})
            await until(lambda: len(streams._router.infos) == 1)
            async with desk(fleet=streams, tracer=gateway.tracer) as d:
                bodies = [{"prompt": f"hello {n}", "max_tokens": 40, "ignore_eos": True} for n in range(3)]
                await asyncio.gather(*(d.http.post("/v1/completions", json=body) for body in bodies))
            await streams.close()
            assert worker.engine.metrics.num_preemptions > 0
    events = [event for span in named(collector.spans, "decode") for event in span.events]
    assert events.count("preempted") == worker.engine.metrics.num_preemptions
    assert events.count("resumed") == events.count("preempted")


async def test_refused_failed_and_abandoned_requests_say_how_they_ended(collector: Collector) -> None:
    tracing = gateway_tracing(collector)
    fleet = FakeFleet(MODEL, says("hi there you"))
    async with desk(fleet=fleet, tracer=tracing.tracer) as d:
        await d.post("/v1/completions", **PROMPT, temperature=-1)
        fleet.refusal_at_submit = QueueFull("full")
        await d.post("/v1/completions", **PROMPT)
        fleet.refusal_at_submit = None
        fleet.gate.clear()
        client = RawClient(d.app, dict(PROMPT))
        serving_it = asyncio.create_task(client.run())
        await until(lambda: fleet.num_running == 1)
        client.leave.set()
        await serving_it
    await asyncio.to_thread(tracing.close)
    bad, full, left = collector.spans
    assert bad.attributes["http.response.status_code"] == 400
    assert (full.attributes["http.response.status_code"], full.attributes["error.type"]) == (429, "queue_full")
    assert bad.attributes["error.type"] == "invalid_request"
    assert [span.failed for span in (bad, full)] == [False, False], "they are no failures of the service"
    assert left.events == ("client_left",)
    assert not left.failed


async def test_grpc_calls_carry_the_context_in_their_metadata(collector: Collector) -> None:
    tracing = gateway_tracing(collector)
    fleet = FakeFleet(MODEL, says("hi there"))
    async with grpc_desk(fleet=fleet, tracer=tracing.tracer) as client:
        await client.generate(tuple(CLIENT.items()))
    await asyncio.to_thread(tracing.close)
    (span,) = collector.spans
    assert (span.name, span.trace_id, span.parent_id) == ("raycomb.v1.Inference/Generate", TRACE_ID, PARENT_ID)
    (request,) = fleet.requests
    assert request.trace == f"00-{TRACE_ID}-{span.span_id}-01"


async def test_http_protobuf_is_spoken_where_it_is_asked_for() -> None:
    with http_collector() as collector:
        tracing = gateway_tracing(collector, "http/protobuf")
        async with desk(tracer=tracing.tracer) as d:
            await d.http.post("/v1/completions", json=PROMPT, headers=CLIENT)
        await asyncio.to_thread(tracing.close)
        assert [span.trace_id for span in collector.spans] == [TRACE_ID]


async def test_a_broken_traceparent_is_nobodys_fault_and_no_parent(collector: Collector) -> None:
    tracing = gateway_tracing(collector)
    async with desk(tracer=tracing.tracer) as d:
        for broken in ("", "00-xyz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "ff" * 4000):
            answer = await d.http.post("/v1/completions", json=PROMPT, headers={"traceparent": broken})
            assert answer.status_code == 200
    await asyncio.to_thread(tracing.close)
    assert [span.parent_id for span in collector.spans] == [""] * 4


async def test_without_an_endpoint_nothing_is_recorded_and_the_client_s_context_goes_nowhere() -> None:
    fleet = FakeFleet(MODEL, says("hi"))
    async with desk(fleet=fleet, tracer=open_tracing(None, "grpc", "raycomb-gateway", "g").tracer) as d:
        await d.http.post("/v1/completions", json=PROMPT, headers=CLIENT)
    assert [request.trace for request in fleet.requests] == [""]


async def test_without_an_endpoint_the_recording_library_is_not_loaded() -> None:
    code = (
        "import sys; from worker.tracing import open_tracing; import cluster.web.api, worker.engine\n"
        "open_tracing(None, 'grpc', 's', 'i').close()\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    root = Path(__file__).parent.parent
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, cwd=root, env={"PYTHONPATH": str(root)}, stdout=asyncio.subprocess.PIPE
    )
    told, _ = await child.communicate()
    assert told.strip() == b"[]"


def config(**more: Any) -> ServiceConfig:
    return service_config({"engine": {"model": "m"}, **more})


@pytest.mark.parametrize(
    ("told", "environment", "expected"),
    [
        ({}, {}, (None, "grpc")),
        ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ("http://c:4317", "grpc")),
        (
            {},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http://c:4318/v1/traces", "http/protobuf"),
        ),
        (
            {"otlp_endpoint": "http://told:1"},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http://told:1", "http/protobuf"),
        ),
        (
            {"otlp_endpoint": "http://told:1", "otlp_protocol": "grpc"},
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            ("http://told:1", "grpc"),
        ),
        (
            {},
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b:2"},
            ("http://b:2", "grpc"),
        ),
        ({"otlp_endpoint": "http://told:1"}, {"OTEL_SDK_DISABLED": "true"}, (None, "grpc")),
    ],
)
def test_what_is_told_beats_the_environment(
    told: dict[str, Any], environment: dict[str, str], expected: tuple[str | None, str]
) -> None:
    made = with_otlp_of(config(**told), environment)
    assert (made.otlp_endpoint, made.otlp_protocol) == expected


def test_an_endpoint_or_a_protocol_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfiguration, match="otlp_endpoint must be a URL"):
        config(otlp_endpoint="localhost:4317")
    with pytest.raises(InvalidConfiguration, match="otlp_endpoint must be a URL"):
        with_otlp_of(config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "nonsense"})
    with pytest.raises(InvalidConfiguration, match="http/json"):
        with_otlp_of(config(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"})

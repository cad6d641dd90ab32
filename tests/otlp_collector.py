"""An OpenTelemetry collector as far as spans need one: takes OTLP over gRPC or HTTP, and keeps what comes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True, slots=True)
class ToldSpan:
    """One span as it came. Ids in hexadecimal, times in seconds since the epoch; `service` and `instance` told it."""

    service: str
    instance: str
    pid: int
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    started_at: float
    ended_at: float
    attributes: dict[str, Any]
    events: tuple[str, ...]
    failed: bool


class Collector:
    """What has come so far. Filled on the server's threads, read on any."""

    def __init__(self) -> None:
        self.url = ""
        self._lock = threading.Lock()
        self._spans: list[ToldSpan] = []

    @property
    def spans(self) -> list[ToldSpan]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[ToldSpan]:
        """In the order of their beginning."""
        mine = [span for span in self.spans if span.trace_id == trace_id]
        return sorted(mine, key=lambda span: (span.started_at, span.ended_at))

    def take(self, message: pb.ExportTraceServiceRequest) -> None:
        told = [
            _told(values_of(batch.resource.attributes), span)
            for batch in message.resource_spans
            for scope in batch.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += told


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()

    class Service(pb_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
            collector.take(request)
            return pb.ExportTraceServiceResponse()

    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        pb_grpc.add_TraceServiceServicer_to_server(Service(), server)  # type: ignore[no-untyped-call]
        collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Tests are quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}"
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield collector
        finally:
            server.shutdown()
            serving.join()


def values_of(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in _typed(pairs)}


def _typed(pairs: Any) -> list[KeyValue]:
    return list(pairs)


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return None if kind is None else getattr(value, kind)


def _told(resource: dict[str, Any], span: Any) -> ToldSpan:
    return ToldSpan(
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        pid=resource["process.pid"],
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        started_at=span.start_time_unix_nano / 1e9,
        ended_at=span.end_time_unix_nano / 1e9,
        attributes=values_of(span.attributes),
        events=tuple(event.name for event in span.events),
        failed=span.status.code == Status.STATUS_CODE_ERROR,
    )

"""OpenTelemetry spans to an OTLP collector, for gateways and workers alike. Not for what the spans say.

Without an endpoint a process has OpenTelemetry's own tracer that does nothing, and the library that records and
exports is not even imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.trace import NoOpTracer, Span, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from planner.errors import InvalidConfiguration

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Protocol = Literal["grpc", "http/protobuf"]

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
HTTP_PATH: Final = "/v1/traces"
EXPORT_TIMEOUT_S: Final = 5
PROBE_TIMEOUT_S: Final = 2
FLUSH_MS: Final = 400

PROPAGATOR: Final = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class Tracing:
    """A process' way to its collector. `close` sends what is left and may block for seconds; `flush` does for less
    than half of one."""

    tracer: Tracer
    flush: Callable[[], None]
    close: Callable[[], None]


def no_tracing() -> Tracing:
    return Tracing(NoOpTracer(), _nothing, _nothing)


def open_tracing(endpoint: str | None, protocol: Protocol, service: str, instance: str) -> Tracing:
    """Spans of `service`, whose process is `instance`, go to `endpoint`; None: nowhere.

    What OpenTelemetry itself reads from the environment holds: headers, certificates, sampling, batches, the name of
    the service. What the collector does not take in time is dropped, with a warning in the log.
    """
    if endpoint is None:
        return no_tracing()
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME") or service
    resource = Resource.create({"service.name": name, "service.instance.id": instance, "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(endpoint, protocol)))

    def flush() -> None:
        provider.force_flush(FLUSH_MS)

    return Tracing(provider.get_tracer("raycomb"), flush, provider.shutdown)


def can_export(endpoint: str, protocol: Protocol) -> bool:
    """Whether a collector takes spans there: it is sent none. May block for as long as an export may take."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = _exporter(endpoint, protocol, PROBE_TIMEOUT_S)
    try:
        return exporter.export([]) is SpanExportResult.SUCCESS
    finally:
        exporter.shutdown()


def check_endpoint(endpoint: str) -> str:
    """The endpoint of a collector as it is. Raises `InvalidConfiguration` for what is no http or https URL."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidConfiguration(
            f"otlp_endpoint must be a URL such as http://localhost:4317, not {endpoint!r}", param="otlp_endpoint"
        )
    return endpoint


def traceparent(span: Span) -> str:
    """The span in W3C's form, for its children in other processes; empty where it is not recorded, so nor are they."""
    if not span.is_recording():
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def parent_of(given: str, state: str = "") -> Context:
    """What a span that stands under this traceparent is started in; under one that is no traceparent, a new trace."""
    carrier = {TRACEPARENT: given, TRACESTATE: state} if state else {TRACEPARENT: given}
    return PROPAGATOR.extract(carrier, Context())


def _exporter(endpoint: str, protocol: Protocol, timeout_s: float = EXPORT_TIMEOUT_S) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, timeout=timeout_s)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    path = urlsplit(endpoint).path.strip("/")
    return HttpExporter(endpoint=endpoint if path else endpoint.rstrip("/") + HTTP_PATH, timeout=timeout_s)


def _nothing() -> None:
    """Nothing was recorded, so there is nothing to send."""

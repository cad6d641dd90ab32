"""Where spans go, by OpenTelemetry's own variables: for services that are not told otherwise.

Read once, where the application is built; workers and gateways on other hosts are given what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from cluster.config import ServiceConfig
from planner.errors import InvalidConfiguration
from worker.tracing import HTTP_PATH, Protocol, check_endpoint

DISABLED: Final = "OTEL_SDK_DISABLED"
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL, TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


def with_otlp_of(config: ServiceConfig, environment: Mapping[str, str]) -> ServiceConfig:
    """The same service with what the environment says of its collector and the configuration does not.

    Raises `InvalidConfiguration` for an endpoint or a protocol that is none.
    """
    if environment.get(DISABLED, "").lower() == "true":
        return config.model_copy(update={"otlp_endpoint": None})
    found: dict[str, Any] = {"otlp_endpoint": config.otlp_endpoint, "otlp_protocol": config.otlp_protocol}
    told = environment.get(TRACES_PROTOCOL) or environment.get(PROTOCOL)
    if told and "otlp_protocol" not in config.model_fields_set:
        if told not in get_args(Protocol):
            known = " or ".join(get_args(Protocol))
            raise InvalidConfiguration(f"{PROTOCOL} must be {known}, not {told!r}", param="otlp_protocol")
        found["otlp_protocol"] = told
    if config.otlp_endpoint is None:
        if own := environment.get(TRACES_ENDPOINT):
            found["otlp_endpoint"] = check_endpoint(own)
        elif base := environment.get(ENDPOINT):
            path = "" if found["otlp_protocol"] == "grpc" else HTTP_PATH
            found["otlp_endpoint"] = check_endpoint(base.rstrip("/") + path)
    return config.model_copy(update=found)

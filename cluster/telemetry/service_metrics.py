"""All metrics that a gateway can tell: its own, and those of every worker that it has a stream to."""

from __future__ import annotations

from typing import Final

from cluster.answers.maker import Service
from cluster.telemetry.gateway_metrics import GATEWAY_METRICS, gateway_samples
from cluster.telemetry.metric import Source
from cluster.telemetry.worker_metrics import WORKER_METRICS, worker_samples

METRICS: Final = (*WORKER_METRICS, *GATEWAY_METRICS)


def metric_sources(service: Service) -> list[Source]:
    """Each worker's samples, then the gateway's."""
    workers = [
        Source(worker_labels(service.model_name, report.info.worker_id), worker_samples(report.snapshot, report.totals))
        for report in service.fleet.reports
    ]
    own = gateway_samples(service.meter, service.fleet)
    return [*workers, Source(gateway_labels(service.model_name, service.gateway_id), own)]


def worker_labels(model_name: str, worker_id: str) -> dict[str, str]:
    return {"model_name": model_name, "worker": worker_id}


def gateway_labels(model_name: str, gateway_id: str) -> dict[str, str]:
    return {"model_name": model_name, "gateway": gateway_id}

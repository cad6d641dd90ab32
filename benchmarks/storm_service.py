"""The service that storms are let loose on: three workers and two gateways that give nothing up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.service_process import ServiceProcess

NUM_WORKERS, NUM_GATEWAYS = 3, 2
WORKER, GATEWAY = "ServeReplica:raycomb:Worker", "ServeReplica:raycomb:Gateway"
"""Parts of the titles of their processes."""

MODEL_NAME = "stormed"
PATIENCE_S = 240.0


@dataclass(frozen=True, slots=True)
class StormedService:
    """A running one, the path or name of its model, and the secret between gateways and workers."""

    process: ServiceProcess
    model: str
    secret: str


def settings_of(model: str, secret: str, **more: Any) -> dict[str, Any]:
    """Settings of `cluster.config.ServiceConfig`: no sequence has lost too many workers, and runs wait for one to come
    back."""
    return {
        "engine": {"model": model, "device": "cpu", "num_threads": 1},
        "http": {"served_model_names": [MODEL_NAME]},
        "num_workers": NUM_WORKERS,
        "num_gateways": NUM_GATEWAYS,
        "data_plane_host": "127.0.0.1",
        "secret": secret,
        "max_failovers": 50,
        "failover_timeout_s": PATIENCE_S,
        **more,
    }

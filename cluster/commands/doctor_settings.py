"""The doctor's look at what a service is told and tells: keys, certificates, a collector for traces, metrics."""

from __future__ import annotations

import http.client
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from cluster.access.certificate_check import check_certificates
from cluster.commands.ask import PROBE_TIMEOUT_S
from cluster.commands.doctor_checks import Finding
from cluster.commands.serve import read_keys
from cluster.commands.service_client import opened
from cluster.config import service_config
from cluster.telemetry.service_metrics import METRICS
from planner.errors import InvalidConfiguration
from worker.tracing import Protocol, can_export

SOON: Final = timedelta(days=14)
"""Certificates that end within this are worth a word: new ones need a rolling restart."""


def keys_finding(path: Path) -> Finding:
    """Whether a service could be given this file."""
    try:
        keys = service_config({"engine": {"model": "any"}, "http": {"keys": read_keys(path)}}).http.keys
    except InvalidConfiguration as error:
        return Finding("keys", error.message, "`raycomb keys` makes entries of such a file")
    hashes = {key.sha256 for key in keys}
    if len(hashes) < len(keys):
        return Finding("keys", f"{path} has {len(keys) - len(hashes)} keys twice", "give each key one entry")
    limited = sum(key.max_open_requests is not None or key.requests_per_minute is not None for key in keys)
    mode = path.stat().st_mode & 0o777
    return Finding("keys", f"{len(keys)} hashes, {limited} with limits (mode {mode:04o})")


def tls_finding(folder: Path, now: datetime) -> Finding:
    """Whether gateways and workers could use the folder, and for how long."""
    advice = "`raycomb certs` makes a folder; roll gateways and workers to have them read it"
    try:
        ends = check_certificates(folder, now)
    except InvalidConfiguration as error:
        return Finding("data plane TLS", error.message, advice)
    told = f"certificates in {folder} are good until {ends:%Y-%m-%d}"
    return Finding("data plane TLS", told, advice if ends - now < SOON else None)


def traces_finding(endpoint: str, protocol: Protocol) -> Finding:
    """Whether a collector takes spans there. Blocks for some seconds where none does."""
    if can_export(endpoint, protocol):
        return Finding("traces", f"{endpoint} takes spans over {protocol}")
    return Finding("traces", f"{endpoint} takes no spans over {protocol}", "start a collector, or name its other port")


def metrics_finding(url: str) -> Finding:
    """Whether the service at `url` tells of every metric that there is."""
    try:
        with opened(f"{url}/metrics", patience_s=PROBE_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return Finding("metrics", f"{url}/metrics gives no answer: {error}", "see the logs of its gateways")
    missing = [metric.name for metric in METRICS if f"# TYPE {metric.name.removesuffix('_total')}" not in page]
    if missing:
        advice = "use the same version here and there"
        return Finding("metrics", f"{url}/metrics lacks {', '.join(missing[:3])} ({len(missing)} in all)", advice)
    return Finding("metrics", f"{url}/metrics tells all {len(METRICS)}")

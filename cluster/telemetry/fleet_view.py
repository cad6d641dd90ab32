"""The fleet as one gateway sees it, as plain JSON values: what the page at `/` draws."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from cluster.answers.maker import Service
from cluster.routing.fleet import WorkerReport
from cluster.web.debug_views import View


def fleet_view(services: Sequence[Service]) -> View:
    """`services`: one for each model, the first of which is what the page talks to. Counters are since the start of the
    process that counts, of all models together. `at`: seconds since 1970."""
    meters = [service.meter for service in services]
    events = [event for meter in meters for event in meter.events.all]
    return {
        "at": time.time(),
        "model": _name(services[0]),
        "models": [_name(service) for service in services],
        "ready": all(service.fleet.ready for service in services),
        "workers": [_worker(report, _name(service)) for service in services for report in service.fleet.reports],
        "gateway": {
            "num_open": sum(meter.num_open for meter in meters),
            "num_tokens": sum(meter.num_tokens for meter in meters),
            "num_cancelled": sum(meter.num_cancelled for meter in meters),
            "num_refused": sum(meter.refused.total() for meter in meters),
            "num_failed": sum(meter.failed.total() for meter in meters),
            "num_failovers": sum(meter.num_failovers for meter in meters),
            "num_workers_lost": sum(meter.num_workers_lost for meter in meters),
        },
        "events": [asdict(event) for event in sorted(events, key=lambda event: event.at)],
    }


def _name(service: Service) -> str:
    model = service.fleet.model
    return (service.settings.served_model_names or ("" if model is None else model.name,))[0]


def _worker(report: WorkerReport, model: str) -> View:
    snapshot, totals = report.snapshot, report.totals
    return {
        "worker": report.info.worker_id,
        "model": model,
        "draining": report.draining,
        "capacity": snapshot.capacity,
        "free_cells": snapshot.free_cells,
        "owned_cells": snapshot.owned_cells,
        "cached_cells": snapshot.cached_cells,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "queued_prefill_tokens": snapshot.queued_prefill_tokens,
        "tokens_generated": totals.tokens_generated,
        "prefix_queries": totals.prefix_queries,
        "prefix_hits": totals.prefix_hits,
        "preemptions": totals.preemptions,
    }

"""The fleet as one gateway sees it, as plain JSON values: what the page at `/` draws."""

from __future__ import annotations

import time
from dataclasses import asdict

from cluster.answer_maker import Service
from cluster.debug_views import View
from cluster.fleet import WorkerReport


def fleet_view(service: Service) -> View:
    """Counters are since the start of the process that counts. `at`: seconds since 1970."""
    meter, model = service.meter, service.fleet.model
    return {
        "at": time.time(),
        "model": (service.settings.served_model_names or ("" if model is None else model.name,))[0],
        "ready": service.fleet.ready,
        "workers": [_worker(report) for report in service.fleet.reports],
        "gateway": {
            "num_open": meter.num_open,
            "num_tokens": meter.num_tokens,
            "num_cancelled": meter.num_cancelled,
            "num_refused": meter.refused.total(),
            "num_failed": meter.failed.total(),
            "num_failovers": meter.num_failovers,
            "num_workers_lost": meter.num_workers_lost,
        },
        "events": [asdict(event) for event in meter.events.all],
    }


def _worker(report: WorkerReport) -> View:
    snapshot, totals = report.snapshot, report.totals
    return {
        "worker": report.info.worker_id,
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

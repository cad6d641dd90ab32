"""A worker killed and a worker frozen under a storm of requests in float32: each answer is that of the undisturbed run.

Used by `benchmarks.two_gpus`. What is asked and compared is `benchmarks.storm_answers`': texts, tokens, endings, usage
and log probabilities, over HTTP and gRPC, at several temperatures, with several choices and penalties.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

from benchmarks.configured_service import configured_service
from benchmarks.failover_storm import Disturbance, disturbed, storm_on
from benchmarks.random_model import write_model
from benchmarks.storm_answers import Ask, the_asks
from benchmarks.storm_service import MODEL_NAME as STORMED_NAME
from benchmarks.two_gpus_losses import STALL_TIMEOUT_S
from benchmarks.two_gpus_plan import NUM_WORKERS, PATIENCE_S, Note, Plan
from benchmarks.two_gpus_service import settings_of
from tests.service_process import ServiceProcess


def exact(plan: Plan, folder: Path, note: Note) -> None:
    """`note` gets what became of the answers when a worker was killed, and when one was frozen."""
    model, secret = write_model(plan.exact_model, folder), secrets.token_hex(16)
    settings = settings_of(plan, model, secret, dtype="float32", gpu_memory_utilization=0.3)
    settings |= {"http": {"served_model_names": [STORMED_NAME]}}
    settings |= {"max_failovers": 10, "failover_timeout_s": PATIENCE_S, "stall_timeout_s": STALL_TIMEOUT_S}
    with configured_service(settings) as service:
        asyncio.run(_exact(plan, service, secret, model, note))


async def _exact(plan: Plan, service: ServiceProcess, secret: str, model: Path, note: Note) -> None:
    fields = {"model": str(model), "asks": asks_of(plan), "num_kills": 1, "num_freezes": 1, "outage_s": 0.0}
    for disturbance in (Disturbance.KILL, Disturbance.FREEZE):
        async with storm_on(service, secret, seed=4, num_workers=NUM_WORKERS, **fields) as storm:
            note(**{disturbance: await disturbed(storm, disturbance)})


def asks_of(plan: Plan) -> list[Ask]:
    least, most = plan.exact_tokens
    return the_asks(plan.exact_requests, least_tokens=least, most_tokens=most)

"""Shared prefixes over two workers: affinity against round robin, with prefills that cost what they cost.

Used by `benchmarks.two_gpus`. Both policies run in a gateway without Serve, whose router can be chosen; workers, wires
and HTTP are the service's. Before each policy other prompts push everything out of the pools.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

from benchmarks.bare_gateway import bare_gateway
from benchmarks.client_processes import ClientProcesses, client_processes
from benchmarks.configured_service import configured_service
from benchmarks.random_model import MODELS, write_model
from benchmarks.two_gpus_mixed import load_figures
from benchmarks.two_gpus_plan import MODEL_NAME, NUM_WORKERS, PATIENCE_S, Note, Plan
from benchmarks.two_gpus_service import KINDS, settings_of
from benchmarks.worker_watch import watched
from cluster.bench import workload
from cluster.bench.online import Server
from cluster.bench.sse_client import Target
from cluster.bench.workloads import Prompt, arrivals, shared_prefix
from cluster.routing.router import Router
from planner.request import Request
from tests.service_process import ServiceProcess

SEED = 3


class RoundRobin(Router):
    """One worker after the other, whatever they hold."""

    def __init__(self, *, max_waiting: int) -> None:
        super().__init__(max_waiting=max_waiting)
        self._number = 0

    def assign(
        self, request_id: int, request: Request, *, owner: str | None = None, avoid: Collection[str] = ()
    ) -> str:
        ids = sorted(info.worker_id for info in self.infos)
        chosen = ids[self._number % len(ids)]
        self._number += 1
        return super().assign(request_id, request, avoid={*avoid, *ids} - {chosen})


POLICIES = {"affinity": Router, "round_robin": RoundRobin}


def prefixes(plan: Plan, folder: Path, note: Note) -> None:
    """`note` gets the share of prompt tokens found cached, and the times to the first token, of each policy."""
    model, secret = write_model(plan.fast_model, folder), secrets.token_hex(16)
    settings = settings_of(plan, model, secret, max_cells=plan.prefixes.max_cells)
    with configured_service(settings | {"num_gateways": 1}) as service, client_processes(plan.num_clients) as clients:
        asyncio.run(_prefixes(plan, model, service, secret, clients, note))


async def _prefixes(
    plan: Plan, model: Path, service: ServiceProcess, secret: str, clients: ClientProcesses, note: Note
) -> None:
    async with watched(lambda: service.processes(KINDS["workers"]), secret) as watch:
        await watch.wait_for(NUM_WORKERS, PATIENCE_S)
        addresses = {worker.worker_id: worker.address for worker in watch.alive}
    found: dict[str, dict[str, Any]] = {}
    for name, policy in POLICIES.items():
        async with bare_gateway(str(model), MODEL_NAME, secret, addresses, RoundRobin(max_waiting=2048)) as url:
            await _ask(clients, url, other_prompts(plan), None)
        router = policy(max_waiting=2048)
        async with bare_gateway(str(model), MODEL_NAME, secret, addresses, router) as url:
            figures = await _ask(clients, url, prompts_of(plan), times_of(plan))
        told = router.predictions
        figures |= {"cached_share": round(told.num_cached_tokens / told.num_prompt_tokens, 4)}
        figures |= {"best_cached_share": round(best_cached_share(prompts_of(plan), plan), 4)}
        found[name] = figures
        note(**{name: figures})
    first = {name: each["ttft_median_ms"] for name, each in found.items()}
    note(ttft_p50_ratio=round(first["round_robin"] / first["affinity"], 2))


async def _ask(clients: ClientProcesses, url: str, prompts: list[Prompt], times: list[float] | None) -> dict[str, Any]:
    asked = await asyncio.to_thread(clients.ask, Server(Target.parse(url), MODEL_NAME), prompts, times)
    failures = sorted({entry.error for entry in asked.result.records if entry.error is not None})
    if failures:
        raise RuntimeError(f"{len(failures)} kinds of failure: {failures[:3]}")
    return load_figures(asked.result)


def prompts_of(plan: Plan) -> list[Prompt]:
    load = plan.prefixes
    return shared_prefix(
        load.num_requests,
        num_prefixes=load.num_prefixes,
        prefix_len=load.prefix_len,
        input_len=load.input_len,
        output_len=load.output_len,
        vocab_size=MODELS[plan.fast_model]["vocab_size"],
        seed=SEED,
    )


def times_of(plan: Plan) -> list[float]:
    return list(arrivals(plan.prefixes.num_requests, plan.prefixes.rate, 1.0, seed=SEED))


def other_prompts(plan: Plan) -> list[Prompt]:
    """As many tokens as the pools of all workers hold, and a quarter more."""
    load = plan.prefixes
    count = round(1.25 * NUM_WORKERS * load.max_cells / load.prefix_len)
    vocab_size = MODELS[plan.fast_model]["vocab_size"]
    items = workload.uniform(count, load.prefix_len, 1, vocab_size=vocab_size, seed=SEED + 1)
    return [Prompt(list(item.prompt), 1) for item in items]


def best_cached_share(prompts: list[Prompt], plan: Plan) -> float:
    """Where every prefix is computed once, anywhere, and never again."""
    length = plan.prefixes.prefix_len
    distinct = {tuple(prompt.prompt[:length]) for prompt in prompts}
    return (len(prompts) - len(distinct)) * length / sum(prompt.num_input for prompt in prompts)

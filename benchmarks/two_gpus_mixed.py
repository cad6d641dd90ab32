"""The mixed load at one worker, and twice of it at two, through as many gateways: throughput, latency, where time goes.

Used by `benchmarks.two_gpus`. The service is the real one, asked over HTTP by processes of their own.
"""

from __future__ import annotations

import secrets
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.client_processes import ClientProcesses, client_processes
from benchmarks.configured_service import configured_service
from benchmarks.random_model import MODELS, write_model
from benchmarks.two_gpus_plan import NUM_WORKERS, Note, Plan
from benchmarks.two_gpus_service import ProcessorUse, gpus_of_workers, server_of, settings_of
from cluster.bench import workload
from cluster.bench.latency import LoadResult
from cluster.bench.workloads import Prompt
from tests.service_process import ServiceProcess

WARM_UP_TOKENS = 8


def mixed(plan: Plan, folder: Path, note: Note) -> None:
    """`note` gets the runs of one worker and of two, the ratio of their output tokens a second, and what makes it: how
    fast a worker is beside another one, and how evenly the tokens fell to both."""
    model = write_model(plan.fast_model, folder)
    rates, all_runs = [], []
    with client_processes(plan.num_clients) as clients:
        for num_workers, repeats in zip((1, NUM_WORKERS), plan.mixed.repeats, strict=True):
            settings = settings_of(plan, model, secrets.token_hex(16), num_workers, prefix_caching=False)
            with configured_service(settings) as service:
                clients.ask(server_of(service), prompts_of(plan, num_workers, WARM_UP_TOKENS))
                runs = [one_run(plan, service, clients, num_workers) for _ in range(repeats)]
                note(**{f"workers_{num_workers}": {"runs": runs, "gpus": gpus_of_workers(service)}})
            rates.append(fmean(run["output_tokens_per_s"] for run in runs))
            all_runs.append(runs)
    note(
        output_tokens_per_s=[round(rate, 1) for rate in rates],
        ratio=round(rates[1] / rates[0], 3),
        ratio_of_each_run=[round(run["output_tokens_per_s"] / rates[0], 3) for run in all_runs[1]],
        tokens_per_step_second=[[tokens_per_step_second(run["workers"]) for run in runs] for runs in all_runs],
        share_of_busier_worker=[busier_share(run["workers"]) for run in all_runs[1]],
        where_the_time_goes=[[where_the_time_goes(run) for run in runs] for runs in all_runs],
    )


def tokens_per_step_second(workers: Sequence[Mapping[str, float]]) -> float:
    """Tokens of all workers over the seconds of all their steps: the speed of one, whatever fell to it."""
    seconds = sum(map(_seconds_of_steps, workers))
    return round(sum(worker["sampled_tokens"] for worker in workers) / seconds, 1)


def busier_share(workers: Sequence[Mapping[str, float]]) -> float:
    """The larger share of the tokens; with two workers, 0.5 is even."""
    counts = [worker["sampled_tokens"] for worker in workers]
    return round(max(counts) / sum(counts), 4)


def where_the_time_goes(run: Mapping[str, Any]) -> dict[str, Any]:
    """Of one run: what each worker had to do, how long its steps of each kind took on average, and for what share of
    the time it had none; and the cores that all gateways, the proxy, the clients and Ray's own processes took."""
    workers = [
        {
            "share_of_tokens": round(worker["sampled_tokens"] / run["output_tokens"], 4),
            "share_of_prompt_tokens": _share(worker, run["workers"], "prefilled_tokens"),
            "share_of_sequences": _share(worker, run["workers"], "ended_sequences"),
            "idle_share": round(1 - _seconds_of_steps(worker) / run["duration_s"], 4),
            "step_ms": {
                kind: round(1e3 * worker[f"{kind}_step_seconds"] / worker[f"{kind}_steps"], 3)
                for kind in ("decode", "prefill", "mixed")
                if worker.get(f"{kind}_steps")
            },
        }
        for worker in run["workers"]
    ]
    return {
        "workers": workers,
        "cores": {kind: round(sum(each), 3) for kind, each in run["cores"].items()} | {"clients": run["client_cores"]},
        "busiest_gateway_cores": max(run["cores"]["gateways"], default=0.0),
    }


def _seconds_of_steps(worker: Mapping[str, float]) -> float:
    return sum(value for name, value in worker.items() if name.endswith("step_seconds"))


def _share(worker: Mapping[str, float], workers: Sequence[Mapping[str, float]], name: str) -> float | None:
    total = sum(each.get(name, 0.0) for each in workers)
    return round(worker.get(name, 0.0) / total, 4) if total else None


def prompts_of(plan: Plan, num_workers: int, output_len: int | None = None) -> list[Prompt]:
    """For each worker prompts of the same lengths and of other tokens; all answers of `output_len`, if it is given."""
    vocab_size, load = MODELS[plan.fast_model]["vocab_size"], plan.mixed
    lengths = workload.mixed(load.prompts_each, load.lengths, vocab_size=vocab_size, seed=0)
    rng = np.random.default_rng(0)
    return [
        Prompt(rng.integers(1000, vocab_size, len(item.prompt)).tolist(), output_len or item.output_len)
        for item in lengths
        for _ in range(num_workers)
    ]


def one_run(plan: Plan, service: ServiceProcess, clients: ClientProcesses, num_workers: int) -> dict[str, Any]:
    """All prompts at once, to the last answer."""
    before, use = worker_totals(service.url), ProcessorUse(service)
    asked = clients.ask(server_of(service), prompts_of(plan, num_workers))
    seconds, after = use.seconds(), worker_totals(service.url)
    result = asked.result
    failures = sorted({entry.error for entry in result.records if entry.error is not None})
    if failures:
        raise RuntimeError(f"{len(failures)} kinds of failure: {failures[:3]}")
    figures = load_figures(result)
    num_tokens = figures["output_tokens"]
    return figures | {
        "cores": {kind: [round(used / result.duration_s, 3) for used in each[:9]] for kind, each in seconds.items()},
        "client_cores": round(asked.processor_s / result.duration_s, 3),
        "processor_us_per_token": {kind: round(1e6 * sum(each) / num_tokens, 1) for kind, each in seconds.items()},
        "workers": [
            {name: round(total - before[worker].get(name, 0.0), 3) for name, total in totals.items()}
            for worker, totals in after.items()
        ],
    }


def load_figures(result: LoadResult) -> dict[str, Any]:
    """Throughput and latencies of a load without failures; times to the first token in ms, between events too."""
    spreads = result.spreads()
    num_tokens = sum(entry.num_output for entry in result.records)
    begun = min(entry.sent for entry in result.records)
    return {
        "requests": len(result.records),
        "duration_s": round(result.duration_s, 3),
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / result.duration_s, 1),
        **{
            f"{name}_{rank}_ms": round(getattr(spreads[name], rank), 2)
            for name in spreads
            for rank in ("median", "p99")
        },
        "tokens_per_event": round(num_tokens / sum(len(entry.events) for entry in result.records), 3),
        "last_first_token_s": round(max(entry.events[0] for entry in result.records) - begun, 3),
        "first_end_s": round(min(entry.ended for entry in result.records) - begun, 3),
        "tokens_by_second": by_second(result),
    }


def by_second(result: LoadResult) -> list[int]:
    """Tokens that came in each second of the load; those of an answer are spread evenly over its events."""
    begun = min(entry.sent for entry in result.records)
    counts = np.zeros(int(result.duration_s) + 2)
    for entry in result.records:
        places = (np.asarray(entry.events) - begun).astype(np.int64)
        np.add.at(counts, places, entry.num_output / len(entry.events))
    return [round(count) for count in np.trim_zeros(counts, "b").tolist()]


def worker_totals(url: str) -> dict[str, dict[str, float]]:
    """By worker, from `/metrics`: tokens drawn and prefilled, sequences, steps, and the seconds that these took."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return totals_in(text)


def totals_in(text: str) -> dict[str, dict[str, float]]:
    """What `worker_totals` looks for in a page of metrics."""
    wanted = {
        "raycomb_sampled_tokens_total": "sampled_tokens",
        "raycomb_prefilled_tokens_total": "prefilled_tokens",
        "raycomb_sequences_finished_total": "ended_sequences",
        "raycomb_step_time_seconds_count": "steps",
        "raycomb_step_time_seconds_sum": "step_seconds",
    }
    totals: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := wanted.get(sample.name)) is not None:
                kind = sample.labels.get("kind")
                key = f"{kind}_{name}" if kind else name
                of_worker = totals.setdefault(sample.labels["worker"], {})
                of_worker[key] = of_worker.get(key, 0.0) + sample.value
    return totals

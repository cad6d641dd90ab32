"""Assignment by resident prefixes: what it finds cached, beside other policies, and what an assignment costs.

Three parts: a shared-prefix load on real planners in virtual time; the router's own time with a thousand workers; the
memory of its table under a million distinct prefixes. `--trial` keeps no file.
"""

from __future__ import annotations

import argparse
import gc
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from benchmarks.record import record
from benchmarks.virtual_fleet import (
    STEP_S,
    TOKEN_S,
    VOCAB_SIZE,
    Homes,
    Policy,
    PowerOfTwoChoices,
    RoundRobin,
    Routers,
    best_cached_tokens,
    limits_of,
    run,
    shared_prefixes,
    worker_info,
)
from cluster.routing.residents import MAX_INDEXED_BLOCKS, ResidentIndex
from cluster.routing.router import Router
from planner.blocks import BlockChanges, ResidentBlocks, block_hashes
from planner.limits import Snapshot
from planner.request import Request

NUM_WORKERS = 3
NUM_PREFIXES, PREFIX_TOKENS = 20, 500
NUM_REQUESTS = 2000
SEEDS = (1, 2, 3, 4, 5)
LOADS = {"roomy": (12_288, 60.0), "busy": (8_192, 80.0), "tight": (6_144, 60.0)}
"""Cells of each worker, and requests a second. All prefixes together are 10,000 tokens; the sequences that run at one
time are some thousands more, so in a tight pool no worker can keep all prefixes."""

NUM_SNAPSHOTS = 1000
NUM_ASSIGNED = 5000
NUM_DISTINCT = 1_000_000


def policies(num_cells: int, prefixes: list[int]) -> dict[str, Callable[[], Policy]]:
    limits = limits_of(num_cells)
    return {
        "raycomb": lambda: Routers(NUM_WORKERS, 1, limits),
        "raycomb_two_gateways": lambda: Routers(NUM_WORKERS, 2, limits),
        "round_robin": lambda: RoundRobin(NUM_WORKERS),
        "power_of_two_choices": lambda: PowerOfTwoChoices(NUM_WORKERS, 0),
        "a_home_for_each_prefix": lambda: Homes(NUM_WORKERS, prefixes),
    }


def shared_prefix_load(num_cells: int, rate: float, num_requests: int) -> dict[str, object]:
    """Of each policy, over all seeds: tokens found cached against the best possible and against a home for each prefix,
    times to the first token, and the evenness of load in the least even run."""
    limits = limits_of(num_cells)
    loads = [
        shared_prefixes(num_requests, rate, num_prefixes=NUM_PREFIXES, prefix_tokens=PREFIX_TOKENS, seed=seed)
        for seed in SEEDS
    ]
    best = [best_cached_tokens(prefixes, PREFIX_TOKENS) for _, prefixes in loads]
    cached: dict[str, list[int]] = {}
    figures: dict[str, dict[str, object]] = {}
    for name in policies(num_cells, []):
        made = [policies(num_cells, prefixes)[name]() for _, prefixes in loads]
        outcomes = [
            run(arrivals, policy, NUM_WORKERS, limits) for (arrivals, _), policy in zip(loads, made, strict=True)
        ]
        cached[name] = [sum(outcome.cached_tokens) for outcome in outcomes]
        p50, p99 = np.percentile(np.concatenate([outcome.ttft_s for outcome in outcomes]), (50, 99))
        counts = [np.bincount(outcome.workers, minlength=NUM_WORKERS) for outcome in outcomes]
        figures[name] = {
            "cached_of_best_possible": round(sum(cached[name]) / sum(best), 4),
            "by_seed": [round(found / possible, 4) for found, possible in zip(cached[name], best, strict=True)],
            "ttft_p50_ms": round(1e3 * p50, 2),
            "ttft_p99_ms": round(1e3 * p99, 2),
            "most_requests_over_mean": round(max(float(count.max() / count.mean()) for count in counts), 3),
            "most_tokens_over_mean": round(
                max(max(outcome.tokens_run) / float(np.mean(outcome.tokens_run)) for outcome in outcomes), 3
            ),
        }
        routers = [router for policy in made if isinstance(policy, Routers) for router in policy.routers]
        if routers:
            figures[name]["predictions"] = _sums([asdict(router.predictions) for router in routers])
    for name, found in cached.items():
        figures[name]["cached_of_a_home_for_each"] = round(sum(found) / sum(cached["a_home_for_each_prefix"]), 4)
    return {"ttft_p50_over_raycomb": _over_ours(figures, "ttft_p50_ms"), **figures}


def _sums(counts: list[dict[str, int]]) -> dict[str, int]:
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def _over_ours(figures: dict[str, dict[str, object]], key: str) -> dict[str, float]:
    ours = float(str(figures["raycomb"][key]))
    return {name: round(float(str(row[key])) / ours, 3) for name, row in figures.items() if not name.startswith("ray")}


def thousand_snapshots(num_assigned: int) -> dict[str, object]:
    """Milliseconds of processor time that `Router.assign` takes with a thousand workers, each of which has some of
    2,000 prefixes of 512 tokens; a request in fifty has a prompt of 33,000 tokens and is counted by itself."""
    rng = np.random.default_rng(0)
    prefixes = rng.integers(0, VOCAB_SIZE, (2000, 512))
    router = Router(max_waiting=2048)
    ids = [f"w{number:04}" for number in range(NUM_SNAPSHOTS)]
    names = [tuple(block_hashes(prefix)) for prefix in prefixes]
    for worker_id in ids:
        router.join(worker_info(worker_id, limits_of(200_000)))
        router.observe(worker_id, _snapshot(rng, 1), draining=False, newest_request=0)
        for prefix in rng.choice(2000, 60, replace=False):
            router.learn(worker_id, BlockChanges(added=names[prefix][::-1]))
    assign_s, observe_s = np.empty(num_assigned), np.empty(num_assigned)
    for number in range(num_assigned):
        length = 32_768 if number % 50 == 49 else int(rng.integers(20, 500))
        prompt = np.concatenate([prefixes[int(rng.zipf(1.3)) % 2000], rng.integers(0, VOCAB_SIZE, length)])
        request = Request(prompt=prompt, max_tokens=100)
        begun = time.thread_time()
        worker_id = router.assign(number, request)
        assign_s[number] = time.thread_time() - begun
        snapshot = _snapshot(rng, 4 * number + 8)
        begun = time.thread_time()
        router.observe(worker_id, snapshot, draining=False, newest_request=number)
        router.settle(worker_id, number, 0)
        observe_s[number] = time.thread_time() - begun
    long = np.arange(num_assigned) % 50 == 49
    return {
        "assign_ms": _percentiles(assign_s[~long]),
        "assign_33k_tokens_ms": _percentiles(assign_s[long]),
        "observe_and_settle_ms": _percentiles(observe_s),
    }


def _snapshot(rng: np.random.Generator, step: int) -> Snapshot:
    num_running, queued = int(rng.integers(0, 40)), int(rng.integers(0, 2000))
    return Snapshot(
        capacity=200_000,
        free_cells=100_000,
        owned_cells=50_000,
        cached_cells=50_000,
        num_running=num_running,
        num_waiting=0,
        queued_prefill_tokens=queued,
        step=step,
    )


def _percentiles(seconds: np.ndarray) -> dict[str, float]:
    return {f"p{rank}": round(1e3 * float(np.percentile(seconds, rank)), 4) for rank in (50, 99, 99.9)}


def million_prefixes(num_distinct: int) -> dict[str, object]:
    """Peak memory of both tables, and milliseconds to name a prompt of 100,000 tokens."""
    gc.collect()
    tracemalloc.start()
    index, blocks = ResidentIndex(), ResidentBlocks()
    for row in range(20):
        index.open(row)
    for number in range(num_distinct):
        index.learn(number % 20, BlockChanges(added=(number * 0x9E3779B97F4A7C15 % 2**64,)))
    gateway_bytes, before = tracemalloc.get_traced_memory()[1], tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    for number in range(num_distinct):
        blocks.add((number * 0x9E3779B97F4A7C15 % 2**64,))
    worker_bytes = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    prompt = np.random.default_rng(0).integers(0, VOCAB_SIZE, 100_000)
    times = np.empty(50)
    for number in range(len(times)):
        begun = time.thread_time()
        block_hashes(prompt)
        times[number] = time.thread_time() - begun
    return {
        "num_distinct": num_distinct,
        "blocks_kept_by_gateway": len(index),
        "gateway_peak_bytes": gateway_bytes,
        "blocks_kept_by_worker": len(blocks),
        "worker_peak_bytes": worker_bytes,
        "name_100k_tokens_ms": _percentiles(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trial", action="store_true", help="a tenth of the work, and no file")
    trial = parser.parse_args().trial
    share = 10 if trial else 1
    figures: dict[str, object] = {
        f"shared_prefixes_{name}": shared_prefix_load(num_cells, rate, NUM_REQUESTS // share)
        for name, (num_cells, rate) in LOADS.items()
    }
    figures["thousand_snapshots"] = thousand_snapshots(NUM_ASSIGNED // share)
    figures["million_prefixes"] = million_prefixes(NUM_DISTINCT // share)
    config = {
        "num_workers": NUM_WORKERS,
        "num_prefixes": NUM_PREFIXES,
        "prefix_tokens": PREFIX_TOKENS,
        "num_requests": NUM_REQUESTS // share,
        "seeds": SEEDS,
        "cells_and_rate": LOADS,
        "step_s": STEP_S,
        "token_s": TOKEN_S,
        "num_snapshots": NUM_SNAPSHOTS,
        "max_indexed_blocks": MAX_INDEXED_BLOCKS,
        "bars": {"cached_of_best_possible": 0.95, "load_over_mean": 1.3, "assign_p99_ms": 1.0, "name_100k_ms": 5.0},
    }
    record("placement", config, figures, keep=not trial)


if __name__ == "__main__":
    main()

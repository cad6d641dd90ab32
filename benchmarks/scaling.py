"""Eight workers behind two gateways against one worker, with an executor that only takes time: what plumbing allows.

Each worker ends a step every 50 ms, so a stream has 20 tokens a second whatever the machine, until something is
saturated. Which part that is shows in the processor time of each kind of process for a token. The router's share of a
request's latency is taken at two gateways without Serve whose routers time themselves.

    python -m benchmarks.scaling --workers 8
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import time
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import numpy as np
import psutil

from benchmarks.configured_service import configured_service
from benchmarks.record import record
from benchmarks.stepping_executor import SLOW_STEP_S
from benchmarks.timed_gateway import RouterTimes, timed_gateway
from benchmarks.worker_watch import watched
from cluster.bench.online import Server, run_load
from cluster.bench.sse_client import Target
from cluster.bench.workloads import Prompt
from tests.service_process import ServiceProcess

MODEL, MODEL_NAME = "smollm2-135m", "scaled"
PROMPT_TOKENS = 64
NUM_GATEWAYS = 2
PATIENCE_S = 180.0
KINDS = {
    "workers": "ServeReplica:raycomb:Worker",
    "gateways": "ServeReplica:raycomb:Gateway",
    "haproxy": "haproxy -",
    "ray": "ray",  # whatever of it is none of the above
}


def settings_of(num_workers: int, secret: str) -> dict[str, Any]:
    return {
        "engine": {"model": MODEL, "device": "cpu", "max_num_seqs": 128},
        "http": {"served_model_names": [MODEL_NAME]},
        "num_workers": num_workers,
        "num_gateways": NUM_GATEWAYS,
        "data_plane_host": "127.0.0.1",
        "secret": secret,
        "executor": "benchmarks.stepping_executor:make_slow",
    }


def processor_s(service: ServiceProcess) -> dict[str, float]:
    """Processor time so far of each kind of process of the service, and of this one, which is the clients'."""
    used = dict.fromkeys((*KINDS, "clients"), 0.0)
    for process in service.processes():
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        used[next((kind for kind, part in KINDS.items() if part in title), "ray")] += times.user + times.system
    used["clients"] = time.process_time()
    return used


def prompts_of(count: int, output_len: int) -> list[Prompt]:
    """No two begin alike."""
    rng = np.random.default_rng(0)
    return [Prompt(rng.integers(300, 40_000, PROMPT_TOKENS).tolist(), output_len) for _ in range(count)]


async def load(service: ServiceProcess, num_streams: int, output_len: int) -> dict[str, Any]:
    """All streams at once: tokens a second as clients saw them, and who took how many cores."""
    server = Server(Target.parse(service.url), MODEL_NAME)
    before = await asyncio.to_thread(processor_s, service)
    result = await run_load(server, prompts_of(num_streams, output_len))
    after = await asyncio.to_thread(processor_s, service)
    used = {kind: after[kind] - before[kind] for kind in after}
    failures = sorted({entry.error for entry in result.records if entry.error is not None})
    if failures:
        raise RuntimeError(f"{len(failures)} kinds of failure: {failures[:3]}")
    num_tokens = sum(entry.num_output for entry in result.records)
    spreads = result.spreads()
    return {
        "streams": num_streams,
        "tokens_per_s": round(num_tokens / result.duration_s, 1),
        "ideal_tokens_per_s": num_streams / SLOW_STEP_S,
        "ttft_p50_ms": round(spreads["ttft"].median, 1),
        "itl_p50_ms": round(spreads["itl"].median, 1),
        "itl_p99_ms": round(spreads["itl"].p99, 1),
        "cores": {kind: round(seconds / result.duration_s, 3) for kind, seconds in used.items()},
        "processor_us_per_token": {kind: round(1e6 * seconds / num_tokens, 1) for kind, seconds in used.items()},
    }


async def loads(service: ServiceProcess, num_workers: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    await load(service, 2 * num_workers, 10)  # a warm-up
    return [await load(service, num_workers * streams, args.tokens) for streams in args.streams]


async def router_share(service: ServiceProcess, secret: str, num_workers: int, args: argparse.Namespace) -> Any:
    """The same load, the lightest that is asked for, on two gateways that time their routers."""
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(watched(lambda: service.processes(KINDS["workers"]), secret))
        await watch.wait_for(num_workers, PATIENCE_S)
        addresses = {worker.worker_id: worker.address for worker in watch.alive}
    with ExitStack() as gateways:
        made = [
            gateways.enter_context(timed_gateway(MODEL, MODEL_NAME, secret, addresses)) for _ in range(NUM_GATEWAYS)
        ]
        prompts = prompts_of(num_workers * args.streams[0] * args.rounds, args.tokens)
        shares = [prompts[place :: len(made)] for place in range(len(made))]
        concurrency = num_workers * args.streams[0] // len(made)
        begun = time.perf_counter()
        await asyncio.gather(
            *(
                run_load(Server(Target.parse(g.url), MODEL_NAME), share, max_concurrency=concurrency)
                for g, share in zip(made, shares, strict=True)
            )
        )
        duration_s = time.perf_counter() - begun
        return share_figures([gateway.times() for gateway in made], duration_s)


def share_figures(times: list[RouterTimes], duration_s: float) -> dict[str, Any]:
    """Of all gateways together; shares are of each request by itself."""
    assign, router, first, latency = (
        np.concatenate([getattr(each, name) for each in times])
        for name in ("assign_s", "router_s", "first_token_s", "latency_s")
    )
    told_s = sum(each.told_s for each in times)
    return {
        "requests": len(assign),
        "assign_ms": _percentiles(1e3 * assign),
        "latency_ms": _percentiles(1e3 * latency),
        "first_token_ms": _percentiles(1e3 * first),
        "router_share_of_latency": _percentiles(router / latency),
        "assign_share_of_first_token": _percentiles(assign / first),
        "reports_per_s": round(sum(each.num_told for each in times) / duration_s, 1),
        "report_us": round(1e6 * told_s / sum(each.num_told for each in times), 2),
        "reports_share_of_gateway_processor": round(told_s / sum(each.processor_s for each in times), 4),
    }


def _percentiles(values: np.ndarray) -> dict[str, float]:
    return {f"p{rank}": round(float(np.percentile(values, rank)), 6) for rank in (50, 99)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 16, 32, 64], help="on each worker")
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers of each stream, for the router's share")
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    secret = secrets.token_hex(16)
    with configured_service(settings_of(1, secret)) as service:
        one = asyncio.run(loads(service, 1, args))
    with configured_service(settings_of(args.workers, secret)) as service:
        many = asyncio.run(loads(service, args.workers, args))
        share = asyncio.run(router_share(service, secret, args.workers, args))
    ratios = [round(m["tokens_per_s"] / o["tokens_per_s"], 2) for m, o in zip(many, one, strict=True)]
    figures = {"one_worker": one, "many_workers": many, "tokens_per_s_over_one_worker": ratios, "router": share}
    config = vars(args) | {"num_gateways": NUM_GATEWAYS, "step_s": SLOW_STEP_S, "prompt_tokens": PROMPT_TOKENS}
    record("scaling", config, figures, keep=not args.trial)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Tokens from a worker to HTTP clients: Raycomb's data plane against one Serve handle stream a request.

Both sides serve the same load to the same client on the same machine, behind the same front, and neither computes a
model: a step is a pause of 5 ms. Also how long a token is on its way from the engine to a lone client.

    python -m benchmarks.against_handle_streams --sequences 256 --tokens 100
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from benchmarks.record import record
from benchmarks.served import served
from benchmarks.stepping_executor import STEP_S
from cluster.bench.latency import Spread
from cluster.bench.online import Server, run_load
from cluster.bench.sse_client import Target, post_events
from cluster.bench.workloads import Prompt
from cluster.serving.front import free_ports

MODEL = "smollm2-135m"
PROMPT = list(range(300, 308))
BARS = {"throughput_ratio": 3.0, "first_token_p50_ms": 5.0}
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
}


async def throughput(url: str, *, sequences: int, tokens: int) -> dict[str, float]:
    """Everything at once; tokens a second as the clients saw them."""
    server = Server(Target.parse(url), MODEL)
    cpu = time.process_time()
    result = await run_load(server, [Prompt(PROMPT, tokens)] * sequences)
    cpu = time.process_time() - cpu
    failures = {record.error for record in result.records if record.error is not None}
    if failures:
        raise RuntimeError(f"{len(failures)} kinds of failure: {sorted(failures)[:3]}")
    spreads = result.spreads()
    return {
        "tokens_per_s": result.summary()["output_throughput"] or 0.0,
        "events": sum(len(record.events) for record in result.records),
        "median_ttft_ms": spreads["ttft"].median,
        "median_itl_ms": spreads["itl"].median,
        "p99_itl_ms": spreads["itl"].p99,
        "client_cpu_share": cpu / result.duration_s,
    }


async def first_token_delays(url: str, repeats: int) -> list[float]:
    """Seconds from the end of the step that made the first token to its receipt, one request at a time."""
    body: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "stream": True, "logprobs": 0}
    body["ignore_eos"] = True
    delays = []
    for _ in range(repeats):
        async with aclosing(post_events(Target.parse(url), "/v1/completions", body)) as arrivals:
            first = await anext(arrivals)
            choice = json.loads(first.payloads[0])["choices"][0]
            delays.append(first.at - choice["logprobs"]["token_logprobs"][0])
            async for _ in arrivals:
                pass
    return delays


async def measure_side(url: str, args: argparse.Namespace) -> dict[str, float]:
    """The run of median throughput, after a warm-up."""
    await throughput(url, sequences=min(16, args.sequences), tokens=min(10, args.tokens))
    runs = [await throughput(url, sequences=args.sequences, tokens=args.tokens) for _ in range(args.repeats)]
    return sorted(runs, key=lambda run: run["tokens_per_s"])[len(runs) // 2]


def measure(args: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """One side after the other, since both want both cores."""
    words = [
        *("serve", MODEL, "--device", "cpu", "--num-workers", "1", "--num-gateways", "1", "--host", "127.0.0.1"),
        *("--executor", "benchmarks.stepping_executor:make", "--max-num-seqs", str(args.sequences)),
        *("--front", args.front),
    ]
    with served("cluster.cli", words, port=free_ports(1)[0], log=logs / "ours.log") as url:
        ours = asyncio.run(measure_side(url, args))
        delays = asyncio.run(first_token_delays(url, args.first_tokens))
    words = ["--step-ms", str(STEP_S * 1e3)]
    with served("benchmarks.handle_streams_baseline", words, port=free_ports(1)[0], log=logs / "theirs.log") as url:
        theirs = asyncio.run(measure_side(url, args))
    delay = Spread.of_seconds(delays)
    return {
        "ours": ours,
        "handle_streams": theirs,
        "ideal_tokens_per_s": args.sequences / STEP_S,
        "throughput_ratio": ours["tokens_per_s"] / theirs["tokens_per_s"],
        "first_token_p50_ms": delay.median,
        "first_token_mean_ms": delay.mean,
        "first_token_p99_ms": delay.p99,
        "first_token_min_ms": min(delays, default=math.nan) * 1e3,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--first-tokens", type=int, default=200, help="lone requests for the first token's delay")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side; the median one counts")
    parser.add_argument("--front", choices=("haproxy", "python"), default="haproxy", help="of both sides")
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    if args.front == "haproxy":
        os.environ.update(HAPROXY)
    with tempfile.TemporaryDirectory() as logs:
        figures = measure(args, Path(logs))
    met = {
        "throughput_ratio": figures["throughput_ratio"] >= BARS["throughput_ratio"],
        "first_token_p50_ms": figures["first_token_p50_ms"] <= BARS["first_token_p50_ms"],
    }
    for side in ("handle_streams", "ours"):
        print(f"{side:>15}: {figures[side]['tokens_per_s']:10.0f} tokens/s")
    print(f"{'ratio':>15}: {figures['throughput_ratio']:10.2f}")
    print(f"{'first token':>15}: {figures['first_token_p50_ms']:10.2f} ms p50, {figures['first_token_p99_ms']:.2f} p99")
    config = vars(args) | {"step_s": STEP_S, "model": MODEL, "prompt_tokens": len(PROMPT)}
    record("against_handle_streams", config, figures | {"bars": BARS, "met": met}, keep=not args.trial)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""What traces cost: one service under the same load, in turns with requests that are sampled and some that are not.

The service runs with an executor that computes nothing, so whatever it takes is plumbing. Its clients say which of
their requests are sampled, so nothing else differs between two turns; in each pair the other one goes first. Judged is
the processor time of gateway and worker together for each token, as throughput on a shared machine is others' work.
The collector runs beside, in the benchmark's own process.

    python -m benchmarks.trace_overhead --sequences 64 --tokens 128 --pairs 8
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import statistics
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.against_handle_streams import HAPROXY, MODEL, PROMPT
from benchmarks.metrics_overhead import MARK, service_processor_s
from benchmarks.record import record
from benchmarks.served import served
from benchmarks.stepping_executor import STEP_S
from cluster.bench.online import Server, run_load
from cluster.bench.sse_client import Target
from cluster.bench.workloads import Prompt
from cluster.serving.front import free_ports
from tests.otlp_collector import grpc_collector

BAR: Final = 0.05
SPANS_PER_REQUEST: Final = 5  # the request's, the run's and three phases
EXPORTED_WITHIN_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class TracingServer(Server):
    """A server whose clients name a trace of its own for each request, sampled or not."""

    sampled: bool = True

    @property
    def headers(self) -> dict[str, str]:
        flags = "01" if self.sampled else "00"
        return {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}"}


async def turn(url: str, mark: str, args: argparse.Namespace, *, sampled: bool) -> dict[str, float]:
    """Processor time for each token, and tokens a second, of one load."""
    server = TracingServer(Target.parse(url), MODEL, sampled=sampled)
    before = service_processor_s(mark)
    result = await run_load(server, [Prompt(PROMPT, args.tokens)] * args.sequences)
    await asyncio.sleep(args.settle_s)  # spans are sent a little later
    after = service_processor_s(mark)
    if errors := {each.error for each in result.records if each.error is not None}:
        raise RuntimeError(f"{len(errors)} kinds of failure: {sorted(errors)[:3]}")
    num_tokens = args.sequences * args.tokens
    used = {kind: (after[kind] - before[kind]) / num_tokens for kind in after}
    return {
        "s_per_token": sum(used.values()),
        "gateway_s_per_token": used["Gateway"],
        "worker_s_per_token": used["Worker"],
        "tokens_per_s": result.summary()["output_throughput"] or 0.0,
    }


async def measure(url: str, mark: str, args: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    """Pairs of an `on` and an `off` turn."""
    await turn(url, mark, args, sampled=True)
    pairs = []
    for number in range(args.pairs):
        pair = {}
        for sampled in (number % 2 == 0, number % 2 == 1):
            pair["on" if sampled else "off"] = await turn(url, mark, args, sampled=sampled)
        pairs.append(pair)
    return pairs


def summary(pairs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians, and how much more a token costs with traces than without, over all pairs together."""

    def of(side: str, what: str) -> list[float]:
        return [pair[side][what] for pair in pairs]

    sides = {side: {what: statistics.median(of(side, what)) for what in pairs[0][side]} for side in ("on", "off")}
    return sides | {
        "overhead": sum(of("on", "s_per_token")) / sum(of("off", "s_per_token")) - 1,
        "throughput_loss": 1 - sum(of("on", "tokens_per_s")) / sum(of("off", "tokens_per_s")),
        "overheads": [round(pair["on"]["s_per_token"] / pair["off"]["s_per_token"] - 1, 4) for pair in pairs],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--settle-s", type=float, default=1.0, help="after each load, for what is sent later")
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    mark = uuid.uuid4().hex
    environment = {MARK: mark, "RAY_AUTH_MODE": "disabled", "OTEL_BSP_SCHEDULE_DELAY": "500"}
    os.environ.update(HAPROXY | environment)
    with tempfile.TemporaryDirectory() as logs, grpc_collector() as collector:
        words = [
            *("serve", MODEL, "--device", "cpu", "--num-workers", "1", "--num-gateways", "1", "--host", "127.0.0.1"),
            *("--executor", "benchmarks.stepping_executor:make", "--max-num-seqs", str(args.sequences)),
            *("--otlp-endpoint", collector.url),
        ]
        with served("cluster.cli", words, port=free_ports(1)[0], log=Path(logs) / "service.log") as url:
            pairs = asyncio.run(measure(url, mark, args))
            expected = SPANS_PER_REQUEST * args.sequences * (args.pairs + 1)
            deadline = time.monotonic() + EXPORTED_WITHIN_S
            while len(collector.spans) < expected and time.monotonic() < deadline:
                time.sleep(0.2)
        num_spans = len(collector.spans)
    figures = summary(pairs) | {"num_spans": num_spans, "spans_expected": expected, "pairs": pairs, "bar": BAR}
    met = {"overhead": figures["overhead"] <= BAR, "no_span_was_lost": num_spans == expected}
    print(f"traces: {figures['overhead']:.2%} more processor time, {figures['throughput_loss']:.2%} less throughput")
    record(
        "trace_overhead", vars(args) | {"step_s": STEP_S, "model": MODEL}, figures | {"met": met}, keep=not args.trial
    )
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

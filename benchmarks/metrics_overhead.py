"""What counting costs: the processor time of metrics and of a log line for each request, beside all that gateway and
worker take for the same tokens.

The service runs with an executor that computes nothing, so whatever it takes is plumbing; its processes' own processor
time is read from the system. What metrics add to that is timed alone, call for call as the service makes them: a
difference of two whole runs would drown in the noise of a shared machine.

    python -m benchmarks.metrics_overhead --sequences 256 --tokens 100
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import ray
from ray._common.ray_constants import LOGGING_ROTATE_BACKUP_COUNT, LOGGING_ROTATE_BYTES

from benchmarks.against_handle_streams import HAPROXY, MODEL, throughput
from benchmarks.record import record
from benchmarks.served import served
from benchmarks.stepping_executor import STEP_S
from cluster.headers import Terms
from cluster.routing.last_report import LastReport
from cluster.serving.front import free_ports
from cluster.telemetry.gateway_meter import GatewayMeter
from cluster.telemetry.gateway_metrics import BETWEEN_TOKENS
from cluster.telemetry.metric import Sample, Source
from cluster.telemetry.ray_metrics import PERIOD_S as RAY_PERIOD_S
from cluster.telemetry.ray_metrics import RayMetrics
from cluster.telemetry.request_log import RequestLog
from cluster.telemetry.request_record import RequestRecord
from planner.limits import Snapshot
from planner.metrics import Metrics
from protos import worker_pb2 as pb
from worker.stats import StepKind
from worker.totals import PERIOD_S, Tally
from worker.wire import snapshot_to_proto
from worker.wire_totals import totals_to_proto

BAR = 0.02
MARK = "RAYCOMB_BENCHMARK_MARK"
NUM_CALLS = 200_000


def processor_s(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def gateway_s_per_token() -> dict[str, float]:
    """Counting a token of one of 256 choices; and telling Ray, once a period, of more tokens than it is told of."""
    meter = GatewayMeter()
    requests = [meter.request(Terms()) for _ in range(256)]
    labels = {"model_name": "m", "gateway": "g"}
    export = RayMetrics(lambda: [Source(labels, [Sample(BETWEEN_TOKENS, meter.between_tokens.distribution)])])
    asyncio.run(export.publish())  # makes Ray's instrument

    def count() -> None:
        for number in range(NUM_CALLS):
            requests[number % 256].tokens(0, 1)

    counting = processor_s(count)
    telling = processor_s(lambda: asyncio.run(export.publish()))
    return {"counting_s": counting / NUM_CALLS, "telling_ray_s": telling}


def log_s_per_request(folder: Path) -> float:
    """The line of a request that is over, as a gateway of `raycomb serve --log-requests` writes it."""
    log = RequestLog(folder / "requests.log", LOGGING_ROTATE_BYTES, LOGGING_ROTATE_BACKUP_COUNT)

    def lines() -> None:
        for number in range(NUM_CALLS // 20):
            made = RequestRecord("POST /v1/completions", f"request-{number}", tell=log.write, tenant="acme", status=200)
            made.num_prompt_tokens, made.num_tokens, made.first_token_s = 31, 100, 0.0412
            made.reasons.append("length")
            made.finish()

    took = processor_s(lines) * 20 / NUM_CALLS
    log.close()
    return took


def worker_s() -> dict[str, float]:
    """A step's own counting, and what is done once a period: totals taken, written and, in the gateway, read."""
    tally = Tally(Metrics(), {})
    last, snapshot = LastReport(), snapshot_to_proto(Snapshot(1, 1, 0, 0, 0, 0, 0, 1))
    last.introduce(pb.WorkerInfo(worker_id="w"))

    def steps() -> None:
        for number in range(NUM_CALLS):
            tally.moved([], 0.0)
            tally.step(StepKind.DECODE, 0.005)
            tally.due(number * 1e-9)

    def periods() -> None:
        for _ in range(NUM_CALLS // 100):
            message = pb.StepUpdates(totals=totals_to_proto(tally.totals()), snapshot=snapshot)
            last.take(pb.StepUpdates.FromString(message.SerializeToString()))

    return {"step_s": processor_s(steps) / NUM_CALLS, "period_s": processor_s(periods) * 100 / NUM_CALLS}


def service_processor_s(mark: str) -> dict[str, float]:
    """Processor time so far of the replicas of the service that carries `mark`."""
    used = {"Gateway": 0.0, "Worker": 0.0}
    for process in psutil.process_iter():
        try:
            title = " ".join(process.cmdline())
            kind = title.rpartition(":")[2].partition(".")[0].split(" ")[0]
            if "ServeReplica" in title and kind in used and process.environ().get(MARK) == mark:
                times = process.cpu_times()
                used[kind] += times.user + times.system
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return used


def measure(args: argparse.Namespace, log: Path) -> dict[str, float]:
    os.environ[MARK] = mark = uuid.uuid4().hex
    words = [
        *("serve", MODEL, "--device", "cpu", "--num-workers", "1", "--num-gateways", "1", "--host", "127.0.0.1"),
        *("--executor", "benchmarks.stepping_executor:make", "--max-num-seqs", str(args.sequences)),
    ]
    with served("cluster.cli", words, port=free_ports(1)[0], log=log) as url:
        asyncio.run(throughput(url, sequences=16, tokens=10))
        before = service_processor_s(mark)
        waves = [asyncio.run(throughput(url, sequences=args.sequences, tokens=args.tokens)) for _ in range(args.waves)]
        after = service_processor_s(mark)
    num_steps = args.tokens * args.waves
    return {
        "tokens_per_s": statistics.fmean(wave["tokens_per_s"] for wave in waves),
        "gateway_s_per_token": (after["Gateway"] - before["Gateway"]) / (args.sequences * num_steps),
        "worker_s_per_step": (after["Worker"] - before["Worker"]) / num_steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--waves", type=int, default=5, help="how often all sequences are asked for at once")
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.update(HAPROXY)
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    gateway, worker = gateway_s_per_token(), worker_s()
    ray.shutdown()
    with tempfile.TemporaryDirectory() as logs:
        log_s = log_s_per_request(Path(logs))
        service = measure(args, Path(logs) / "service.log")
    step_s = args.sequences / service["tokens_per_s"]
    shares = {
        "gateway_share": (gateway["counting_s"] + gateway["telling_ray_s"] / (service["tokens_per_s"] * RAY_PERIOD_S))
        / service["gateway_s_per_token"],
        "log_share": log_s / (args.tokens * service["gateway_s_per_token"]),
        "worker_share": (worker["step_s"] + worker["period_s"] * step_s / PERIOD_S) / service["worker_s_per_step"],
    }
    shares["gateway_and_log_share"] = shares["gateway_share"] + shares["log_share"]
    met = {name: share <= BAR for name, share in shares.items()}
    for name, share in shares.items():
        print(f"{name:>21}: {share:8.2%}")
    config = vars(args) | {"step_s": STEP_S, "model": MODEL, "num_calls": NUM_CALLS}
    figures = {
        "gateway": gateway,
        "log_s_per_request": log_s,
        "worker": worker,
        "service": service,
        **shares,
        "bar": BAR,
        "met": met,
    }
    record("metrics_overhead", config, figures, keep=not args.trial)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""A service between hostile clients: malformed requests over HTTP and gRPC, and connections that are slow or half gone.

The real service with a fake executor. Clients that behave ask all the time at a pace of their own, in turns of calm and
of hostility; in each hostile turn there are slow connections, and a share of the malformed requests is sent. Judged: no
process ends, nothing leaks, no 5xx but 503, and behaved clients are served at nearly the rate of calm turns. Then
schemathesis makes requests out of docs/openapi.json for a while.

    python -m benchmarks.hostile_clients --requests 10000 --connections 200
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.cluster_state import cluster_state
from benchmarks.configured_service import configured_service
from benchmarks.hostile_connections import hostile_connections
from benchmarks.hostile_requests import (
    GrpcCase,
    HttpCase,
    Outcomes,
    grpc_cases,
    http_bytes,
    http_cases,
    made,
    send_bodies,
    send_bytes,
    send_messages,
)
from benchmarks.record import record
from benchmarks.storm_service import GATEWAY, MODEL_NAME, WORKER, settings_of
from cluster.serving.front import Front
from tests.asked_program import AskedProgram
from tests.service_process import ROOT, ServiceProcess, tiny_checkpoint

HOST: Final = "127.0.0.1"
BAR: Final = 0.9
AT_ONCE: Final = 4
IDLE_WITHIN_S: Final = 90.0
NUM_STEADY, STEADY_PERIOD_S = 8, 0.4
SETTLED_WITHIN_S: Final = 20.0
"""What clients that hung up last had asked for is cancelled by then, also on a busy machine."""
SLACK: Final = {"file_descriptors": 8, "threads": 4, "tasks": 3, "requests": 0, "objects": 0}
"""The most that may be left over of each at a process."""

STEADY_BODY: Final = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 2, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Cases:
    """Malformed requests of all kinds."""

    bytes_: list[bytes]
    bodies: list[HttpCase]
    messages: list[GrpcCase]

    @property
    def count(self) -> int:
        return len(self.bytes_) + len(self.bodies) + len(self.messages)

    def share(self, turn: int, of: int) -> Cases:
        return Cases(self.bytes_[turn::of], self.bodies[turn::of], self.messages[turn::of])


def make_cases(count: int, seed: int) -> Cases:
    """`count` in all: four of ten are bodies, three mangled as a whole, three are gRPC's."""
    return Cases(
        made(http_bytes(), count * 3 // 10, seed),
        made(http_cases(), count - 2 * (count * 3 // 10), seed),
        made(grpc_cases(), count * 3 // 10, seed),
    )


@dataclass(slots=True)
class Turn:
    """What behaved clients got in a turn: answers, seconds each, and what was not an answer."""

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.seconds if self.seconds else 0.0


class Behaved:
    """Clients that ask each `STEADY_PERIOD_S`, or as soon as they have their answer if that took longer."""

    def __init__(self, url: str) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=30, trust_env=False)

    async def during(self, work: Any) -> Turn:
        """What they got until `work` was done."""
        turn, begun = Turn(), time.monotonic()
        clients = [asyncio.create_task(self._ask(turn, number)) for number in range(NUM_STEADY)]
        try:
            await work
        finally:
            turn.seconds = time.monotonic() - begun
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        return turn

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, turn: Turn, number: int) -> None:
        await asyncio.sleep(number * STEADY_PERIOD_S / NUM_STEADY)
        while True:
            begun = time.monotonic()
            try:
                answer = await self._http.post("/v1/completions", json=STEADY_BODY)
                if answer.status_code == 200:
                    turn.latencies_s.append(time.monotonic() - begun)
                else:
                    turn.failures.append(f"{answer.status_code}: {answer.text[:200]}")
            except httpx.HTTPError as error:
                turn.failures.append(repr(error))
            await asyncio.sleep(max(0.0, STEADY_PERIOD_S - (time.monotonic() - begun)))


class Watch:
    """What a service holds when it is idle: by process, and as its processes tell it."""

    def __init__(self, service: ServiceProcess, state: AskedProgram) -> None:
        self._service = service
        self._state = state

    def look(self) -> dict[str, dict[str, int]]:
        """Counts by process, once nothing runs. Raises `AssertionError` where something does for too long."""
        deadline = time.monotonic() + IDLE_WITHIN_S
        while True:
            state = self._state.ask()
            busy = [w for w in state["workers"] if w["num_running"] or w["num_waiting"] or w["owned_cells"]]
            busy += [g for g in state["gateways"] if g["num_requests"]]
            if not busy:
                break
            assert time.monotonic() < deadline, f"still busy: {busy}"
            time.sleep(0.5)
        for worker in state["workers"]:
            assert worker["free_cells"] + worker["cached_cells"] == worker["capacity"], f"cells are lost: {worker}"
        found: dict[str, dict[str, int]] = {}
        for title in (GATEWAY, WORKER):
            for process in self._service.processes(title):
                counts = {"file_descriptors": process.num_fds(), "threads": process.num_threads()}
                found[f"{title.rpartition(':')[2]} {process.pid}"] = counts
        for number, gateway in enumerate(sorted(state["gateways"], key=str)):
            objects = gateway["num_generations"] + gateway["num_runs"] + gateway["num_answers"]
            counts = {"tasks": sum(gateway["tasks"].values()), "requests": gateway["num_requests"], "objects": objects}
            found[f"state of gateway {number}"] = counts
        return found


def left_over(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    """What there is more of than before and than chance explains, and processes that came or went."""
    found = [f"{name} came or went" for name in before.keys() ^ after.keys()]
    for name in before.keys() & after.keys():
        for what, count in after[name].items():
            if count - before[name][what] > SLACK[what]:
                found.append(f"{name}: {what} {before[name][what]} -> {count}")
    return found


def left_over_for_good(before: dict[str, dict[str, int]], look: Callable[[], dict[str, dict[str, int]]]) -> list[str]:
    """What is still left over after `SETTLED_WITHIN_S`; blocks for as long as there is something."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while (found := left_over(before, look())) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


async def hostility(
    service: ServiceProcess, cases: Cases, outcomes: Outcomes, *, num_connections: int, least_s: float, seed: int
) -> None:
    """One hostile turn: the connections for all of it, the cases as fast as a few clients send them."""
    begun = time.monotonic()
    async with hostile_connections(HOST, service.port, num_connections, seed):
        async with asyncio.TaskGroup() as sending:
            sending.create_task(send_bytes(HOST, service.port, cases.bytes_, outcomes, at_once=AT_ONCE))
            sending.create_task(send_bodies(HOST, service.port, cases.bodies, outcomes, at_once=AT_ONCE))
            target = f"{HOST}:{service.grpc_port}"
            sending.create_task(send_messages(target, cases.messages, outcomes, at_once=AT_ONCE))
        await asyncio.sleep(max(0.0, least_s - (time.monotonic() - begun)))


async def run(
    service: ServiceProcess,
    state: AskedProgram,
    cases: Cases,
    *,
    num_connections: int,
    num_turns: int,
    turn_s: float,
    seed: int,
) -> dict[str, Any]:
    """Figures of calm and hostile turns, one after the other."""
    watch, outcomes, behaved = Watch(service, state), Outcomes(), Behaved(service.url)
    calm, hostile = [], []
    try:
        await behaved.during(asyncio.sleep(turn_s / 2))
        before = await asyncio.to_thread(watch.look)
        for turn in range(num_turns):
            calm.append(await behaved.during(asyncio.sleep(turn_s)))
            share = cases.share(turn, num_turns)
            work = hostility(
                service, share, outcomes, num_connections=num_connections, least_s=turn_s, seed=seed + turn
            )
            hostile.append(await behaved.during(work))
        last = await behaved.during(asyncio.sleep(turn_s / 2))
    finally:
        await behaved.close()
    leaks = await asyncio.to_thread(left_over_for_good, before, watch.look)
    return {
        "calm": told(calm),
        "hostile": told(hostile),
        "rate_ratio": statistics.fmean(turn.rate for turn in hostile) / statistics.fmean(turn.rate for turn in calm),
        "answers_afterwards": len(last.latencies_s),
        "outcomes": dict(sorted(outcomes.counts.items())),
        "faults": outcomes.faults[:50],
        "left_over": leaks,
        "counts_before": before,
    }


def told(turns: Sequence[Turn]) -> dict[str, Any]:
    latencies = sorted(latency for turn in turns for latency in turn.latencies_s)
    return {
        "rates_per_s": [round(turn.rate, 2) for turn in turns],
        "latency_p50_s": round(statistics.median(latencies), 4) if latencies else None,
        "latency_p99_s": round(latencies[int(0.99 * len(latencies))], 4) if latencies else None,
        "failures": [failure for turn in turns for failure in turn.failures][:20],
    }


async def out_of_the_document(url: str, seconds: int, *, max_examples: int, seed: int) -> dict[str, Any]:
    """What schemathesis makes of the service by its OpenAPI document: how it ended, and what it found."""
    command = [
        *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"),
        *(str(ROOT / "docs" / "openapi.json"), "--url", url, "--checks", "not_a_server_error"),
        *("--max-time", str(seconds), "--max-examples", str(max_examples), "--seed", str(seed), "--no-color"),
        *("--request-timeout", "30", "--generation-database", "none", "--continue-on-failure", "--no-shrink"),
        *("--warnings", "off", "--suppress-health-check", "all", "-H", "x-request-timeout-ms: 2000"),
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=tempfile.gettempdir()
    )
    output = (await process.communicate())[0].decode()
    found = re.search(r"(\d[\d,]*) generated", output)
    return {
        "exit_code": process.returncode,
        "num_cases": int(found[1].replace(",", "")) if found else 0,
        "output": output if process.returncode else "",
    }


def verdict(figures: dict[str, Any]) -> dict[str, bool]:
    return {
        "no_faults": not figures["faults"],
        "nothing_left_over": not figures["left_over"],
        "behaved_clients_were_answered": not figures["calm"]["failures"] and not figures["hostile"]["failures"],
        "rate": figures["rate_ratio"] >= BAR,
        "answers_afterwards": figures["answers_afterwards"] > 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="malformed ones")
    parser.add_argument("--connections", type=int, default=200, help="slow or half gone, at once")
    parser.add_argument("--turns", type=int, default=5, help="of calm, and of hostility")
    parser.add_argument("--turn-s", type=float, default=8.0)
    parser.add_argument("--schema-s", type=int, default=40, help="seconds for schemathesis; 0: none")
    parser.add_argument("--front", type=Front, default=Front.AUTO)
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    cases = make_cases(args.requests, args.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_checkpoint(Path(folder)))
        secret, executor = secrets.token_hex(16), "tests.served_fake:make_executor"
        settings = settings_of(model, secret, executor=executor, num_workers=2, num_gateways=1)
        with configured_service(settings, args.front) as service, cluster_state(service.ray_address()) as state:
            work = run(
                service,
                state,
                cases,
                num_connections=args.connections,
                num_turns=args.turns,
                turn_s=args.turn_s,
                seed=args.seed,
            )
            figures = asyncio.run(work)
            met = verdict(figures)
            if args.schema_s:
                found = asyncio.run(out_of_the_document(service.url, args.schema_s, max_examples=200, seed=args.seed))
                figures["schemathesis"] = found
                met["schemathesis"] = found["exit_code"] == 0 and found["num_cases"] > 0
    config = vars(args) | {"front": args.front.value, "num_cases": cases.count, "bar": BAR}
    record(f"hostile_clients-{args.front.value}", config, figures | {"met": met}, keep=not args.trial)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

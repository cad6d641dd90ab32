"""A long life in short: clients come and leave at random, workers and gateways are killed, and nothing may grow.

The real service with a fake executor. In rounds: a storm, in which a worker is killed and in some a gateway, and then
a pause until nobody asks any more and all workers are back. In the pause everything is counted: cells, and at each
process memory, threads, file descriptors and tasks, and Ray's actors and objects. Judged are slopes over the pauses.

    python -m benchmarks.soak --minutes 20
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cluster_state import cluster_state
from benchmarks.configured_service import configured_service
from benchmarks.record import record
from benchmarks.slopes import Growth
from benchmarks.soak_clients import Clients
from benchmarks.storm_answers import the_asks
from benchmarks.storm_service import GATEWAY, MODEL_NAME, NUM_GATEWAYS, NUM_WORKERS, WORKER, settings_of
from tests.asked_program import AskedProgram
from tests.service_process import ServiceProcess, tiny_checkpoint

PAUSE_WITHIN_S = 120.0
NUM_ASKS = 60
MIB = 2**20

BARS = {
    "gateway_mib": 0.5,
    "worker_mib": 0.5,
    "threads": 0.1,
    "file_descriptors": 0.1,
    "tasks": 0.0,
    "generations": 0.0,
    "processes": 0.0,
    "actors": 0.0,
    "objects": 0.0,
}
"""The most growth a minute of what is ours, at the process where it is fastest."""

RAY_BARS = {"ray_mib": 1.0, "ray_threads": 0.5, "ray_file_descriptors": 3.0}
"""The most growth of Ray's own processes for each replica that was killed: they remember the dead, up to bounds of
their own."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much happens: requests a second, seconds of a storm, and every how many rounds a worker or a gateway is
    killed."""

    requests_per_s: float
    storm_s: float
    rounds_to_worker: int
    rounds_to_gateway: int


class Soak:
    """One run. Owner: the task that calls it."""

    def __init__(self, service: ServiceProcess, state: AskedProgram, pace: Pace, seed: int) -> None:
        asks = the_asks(NUM_ASKS, least_tokens=5, most_tokens=60)
        self.clients = Clients(service.url, f"127.0.0.1:{service.grpc_port}", MODEL_NAME, asks)
        self.growth = Growth()
        self.num_rounds = 0
        self.num_killed = {WORKER: 0, GATEWAY: 0}
        self.excused: list[str] = []
        self.lost_cells: list[str] = []
        self._service = service
        self._state = state
        self._pace = pace
        self._chance = random.Random(seed)
        self._begun = time.monotonic()

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self._begun) / 60

    async def round(self) -> None:
        """A storm and a pause."""
        self.num_rounds += 1
        kills_gateway = self.num_rounds % self._pace.rounds_to_gateway == 0
        kills_worker = self.num_rounds % self._pace.rounds_to_worker == 0
        num_clients = int(self._pace.requests_per_s * self._pace.storm_s)
        async with asyncio.TaskGroup() as storm:
            for _ in range(num_clients):
                storm.create_task(self._come_at(self._chance.uniform(0, self._pace.storm_s)))
            if kills_worker:
                storm.create_task(self._kill(WORKER))
            if kills_gateway:
                storm.create_task(self._kill(GATEWAY))
        if kills_gateway:  # its own clients were told so
            self.excused += self.clients.failed
            self.clients.failed = []
        await self._pause()

    async def _come_at(self, delay_s: float) -> None:
        chance = random.Random(self._chance.random())
        await asyncio.sleep(delay_s)
        await self.clients.come(chance)

    async def _kill(self, title: str) -> None:
        """One of the processes with that title, but never the oldest, in which growth would show."""
        await asyncio.sleep(self._chance.uniform(0, self._pace.storm_s))
        younger = (await asyncio.to_thread(self._service.processes, title))[1:]
        if younger:
            self._chance.choice(younger).kill()
            self.num_killed[title] += 1

    async def _pause(self) -> None:
        """Until all are back and nothing runs; then count."""
        deadline = time.monotonic() + PAUSE_WITHIN_S
        while True:
            state = await asyncio.to_thread(self._state.ask)
            whole = len(state["workers"]) == NUM_WORKERS and len(state["gateways"]) == NUM_GATEWAYS
            busy = any(gateway["num_requests"] for gateway in state["gateways"])
            busy |= any(w["num_running"] or w["num_waiting"] or w["owned_cells"] for w in state["workers"])
            if (whole and not busy) or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.5)
        if not whole or busy:
            self.lost_cells.append(f"round {self.num_rounds}: no pause within {PAUSE_WITHIN_S:g} s: {state}"[:1000])
        for worker in state["workers"]:
            if worker["free_cells"] + worker["cached_cells"] + worker["owned_cells"] != worker["capacity"]:
                self.lost_cells.append(f"round {self.num_rounds}: {worker}")
        self.growth.add(self.minutes, _counts_of_state(state) | await asyncio.to_thread(self._counts_of_processes))

    def _counts_of_processes(self) -> dict[tuple[str, str], float]:
        counts: dict[tuple[str, str], float] = {}
        processes = self._service.processes()
        for process in processes:
            try:
                with process.oneshot():
                    title = " ".join(process.cmdline())
                    if not title or "benchmarks.cluster_state" in title:
                        continue
                    kind = "gateway" if GATEWAY in title else "worker" if WORKER in title else "ray"
                    ours = "ray_" if kind == "ray" else ""
                    where = f"{_name(process)} {process.pid}"
                    counts[f"{kind}_mib", where] = process.memory_info().rss / MIB
                    counts[f"{ours}threads", where] = process.num_threads()
                    counts[f"{ours}file_descriptors", where] = process.num_fds()
            except psutil.Error:
                continue
        return counts | {("processes", "service"): len(processes)}


def _name(process: psutil.Process) -> str:
    """What it runs: a Ray actor's title, a module or script, or the program itself."""
    words = process.cmdline()
    scripts = [Path(word).name for word in words[:4] if word.endswith(".py") or word.startswith("benchmarks.")]
    return words[0] if words[0].startswith("ray::") else (scripts or [process.name()])[0]


def _counts_of_state(state: dict[str, Any]) -> dict[tuple[str, str], float]:
    gateways = state["gateways"]
    return {
        ("tasks", "gateways"): max(sum(gateway["tasks"].values()) for gateway in gateways),
        ("generations", "gateways"): sum(gateway["num_generations"] + gateway["num_runs"] for gateway in gateways),
        ("actors", "cluster"): state["actors"],
        ("objects", "cluster"): state["objects"],
    }


def verdict(soak: Soak, warm_up_minutes: float) -> dict[str, Any]:
    """Figures, and whether each bar was met."""
    steepest = soak.growth.steepest(warm_up_minutes)
    kills_a_minute = max(sum(soak.num_killed.values()), 1) / soak.minutes
    growth = {f"{what}_per_minute": slope for what, slope in steepest.items() if what in BARS}
    growth |= {f"{what}_per_kill": slope / kills_a_minute for what, slope in steepest.items() if what in RAY_BARS}
    bars = {f"{what}_per_minute": bar for what, bar in BARS.items()}
    bars |= {f"{what}_per_kill": bar for what, bar in RAY_BARS.items()}
    met = {what: slope <= bars[what] for what, slope in growth.items()}
    met |= {"all_measured": growth.keys() == bars.keys()}
    met |= {"cells": not soak.lost_cells, "answers": not soak.clients.wrong, "no_errors": not soak.clients.failed}
    return {
        "minutes": round(soak.minutes, 1),
        "rounds": soak.num_rounds,
        "clients": dict(soak.clients.counts),
        "killed_workers": soak.num_killed[WORKER],
        "killed_gateways": soak.num_killed[GATEWAY],
        "errors": soak.clients.failed[:20],
        "errors_as_a_gateway_was_killed": len(soak.excused),
        "wrong_answers": soak.clients.wrong,
        "cells_lost": soak.lost_cells[:5],
        "growth": {what: round(slope, 4) for what, slope in growth.items()},
        "bars": bars,
        "met": met,
        "samples": soak.growth.told(),
    }


async def run(soak: Soak, minutes: float) -> None:
    while soak.minutes < minutes:
        await soak.round()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--warm-up-minutes", type=float, default=3.0, help="of each process, not judged")
    parser.add_argument("--requests-per-s", type=float, default=4.0)
    parser.add_argument("--storm-s", type=float, default=20.0)
    parser.add_argument("--rounds-to-worker", type=int, default=2, help="in every such round a worker is killed")
    parser.add_argument("--rounds-to-gateway", type=int, default=8, help="in every such round a gateway is killed")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    secret = secrets.token_hex(16)
    pace = Pace(args.requests_per_s, args.storm_s, args.rounds_to_worker, args.rounds_to_gateway)
    with tempfile.TemporaryDirectory() as folder:
        model = str(tiny_checkpoint(Path(folder)))
        settings = settings_of(model, secret, executor="tests.served_fake:make_executor")
        with configured_service(settings) as service, cluster_state(service.ray_address()) as state:
            soak = Soak(service, state, pace, args.seed)
            asyncio.run(run(soak, args.minutes))
            figures = verdict(soak, args.warm_up_minutes)
    config = vars(args) | {"num_workers": NUM_WORKERS, "num_gateways": NUM_GATEWAYS}
    record("soak", config, figures, keep=not args.trial)
    return 0 if all(figures["met"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

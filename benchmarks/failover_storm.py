"""Sixty streams on three workers while workers, gateways and wires fail: every answer is that of the undisturbed run.

One disturbance at a time, or those named: `kill` (a worker gets SIGKILL at a random token, ten times), `freeze`
(SIGSTOP), `gateway` (one of two gateways is killed: its own clients see an error, nobody else notices, and the workers
end what it ran), `link` (nothing passes between a gateway and a worker any more, and neither is told).

    python -m benchmarks.failover_storm kill freeze --model smollm2-135m
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import secrets
import signal
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import psutil

from benchmarks.bare_gateway import bare_gateway
from benchmarks.configured_service import configured_service
from benchmarks.record import record
from benchmarks.relay import Relay, relay_to
from benchmarks.storm_answers import Answer, Ask, Crowd, Road, the_asks
from benchmarks.storm_service import GATEWAY, MODEL_NAME, NUM_GATEWAYS, NUM_WORKERS, PATIENCE_S, WORKER, settings_of
from benchmarks.worker_watch import Watch, WatchedWorker, watched
from tests.service_process import ServiceProcess

BAR_GATEWAY_FREED_S = 1.0


class Disturbance(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    GATEWAY = "gateway"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Storm:
    """A service, those who ask it, and how often or how long it is disturbed."""

    service: ServiceProcess
    watch: Watch
    secret: str
    model: str
    asks: list[Ask]
    num_kills: int
    num_freezes: int
    outage_s: float
    seed: int
    num_workers: int = NUM_WORKERS

    def crowd(self, heard: Callable[[int], None] = lambda _: None) -> Crowd:
        return Crowd(self.service.url, f"127.0.0.1:{self.service.grpc_port}", MODEL_NAME, heard)


@asynccontextmanager
async def storm_on(service: ServiceProcess, secret: str, **fields: Any) -> AsyncIterator[Storm]:
    async with watched(lambda: service.processes(WORKER), secret) as watch:
        storm = Storm(service=service, watch=watch, secret=secret, **fields)
        await watch.wait_for(storm.num_workers, PATIENCE_S)
        yield storm


async def kill_workers(storm: Storm, num_events: int) -> tuple[list[Answer], dict[str, Any]]:
    """SIGKILL at random tokens; a moment at which no worker serves is put off to the next token."""
    return await _strike(storm, num_events, signal.SIGKILL, storm.num_kills)


async def freeze_workers(storm: Storm, num_events: int) -> tuple[list[Answer], dict[str, Any]]:
    """SIGSTOP at random tokens; SIGCONT once all is answered."""
    return await _strike(storm, num_events, signal.SIGSTOP, storm.num_freezes)


async def _strike(
    storm: Storm, num_events: int, blow: signal.Signals, count: int
) -> tuple[list[Answer], dict[str, Any]]:
    chance = random.Random(storm.seed)
    moments = sorted(chance.randint(1, num_events * 4 // 5) for _ in range(count))
    struck: dict[int, int] = {}

    def heard(event: int) -> None:
        if moments and event >= moments[0]:
            standing = [worker for worker in storm.watch.alive if worker.pid not in struck and worker.snapshot]
            if standing:
                victim = chance.choice(standing)
                struck[victim.pid] = _num_live(victim)
                psutil.Process(victim.pid).send_signal(blow)
                del moments[0]

    answers = await storm.crowd(heard).ask_all(storm.asks)
    for pid in struck:  # what is still frozen cannot end itself, and Serve waits long before it ends it
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(signal.SIGCONT)
    return answers, {"struck": len(struck), "sequences_on_each": list(struck.values())}


async def kill_gateway(storm: Storm, num_events: int) -> tuple[list[Answer], dict[str, Any]]:
    """Who was served by it cannot be known beforehand: those whose answers end in an error, at once."""
    moment = random.Random(storm.seed).randint(num_events // 6, num_events // 3)
    killed_at: list[float] = []

    def heard(event: int) -> None:
        if event >= moment and not killed_at:
            victim = storm.service.processes(GATEWAY)[0]
            killed_at.append(time.monotonic())
            victim.kill()

    answers = await storm.crowd(heard).ask_all(storm.asks)
    hurt = [answer for answer in answers if answer.error is not None]
    spared = [(answer, ask.n) for answer, ask in zip(answers, storm.asks, strict=True) if answer.error is None]
    last_error = max((max(answer.ended_at.values()) for answer in hurt), default=killed_at[0])
    return answers, {
        "killed": len(killed_at),
        "clients_with_an_error": len(hurt),
        "errors": sorted({answer.error or "" for answer in hurt}),
        "told_within_s": round(last_error - killed_at[0], 3),
        "freed_within_s": _freed_within_s(storm.watch.seen, spared, killed_at[0]),
        "step_p50_s": _median_step_s(storm.watch.seen, killed_at[0]),
    }


def _freed_within_s(workers: list[WatchedWorker], spared: list[tuple[Answer, int]], since: float) -> float | None:
    """When the workers, after a step each, ran no more sequences than those which the spared clients waited for."""
    for at in sorted(at for worker in workers for at, _ in worker.history if at > since):
        wanted = sum(n - sum(end <= at for end in answer.ended_at.values()) for answer, n in spared)
        if sum(worker.num_live_at(at) for worker in workers) <= wanted:
            return round(at - since, 3)
    return None


def _median_step_s(workers: list[WatchedWorker], before: float) -> float:
    """Of the steps that ended before that time: nothing is freed within one."""
    ends = [[at for at, num_live in worker.history if at <= before and num_live] for worker in workers]
    return round(statistics.median(b - a for each in ends for a, b in itertools.pairwise(each)), 3)


async def cut_links(storm: Storm, num_events: int) -> tuple[list[Answer], dict[str, Any]]:
    """A gateway in this process reaches the workers over relays, of which all but one are cut at random tokens; each is
    mended when nothing runs on its worker any more, but not before `outage_s`."""
    chance = random.Random(storm.seed)
    moments = sorted(chance.randint(num_events // 8, num_events // 2) for _ in range(storm.num_workers - 1))
    async with AsyncExitStack() as stack:
        workers = storm.watch.alive[: storm.num_workers]
        relays = {w.worker_id: await stack.enter_async_context(relay_to(w.address)) for w in workers}
        addresses = {worker_id: relay.address for worker_id, relay in relays.items()}
        url = await stack.enter_async_context(bare_gateway(storm.model, MODEL_NAME, storm.secret, addresses))
        freed: list[asyncio.Task[float | None]] = []

        def heard(event: int) -> None:
            if moments and event >= moments[0]:
                del moments[0]
                victim = workers[len(freed)]
                freed.append(asyncio.create_task(_cut(relays[victim.worker_id], victim, storm.outage_s)))

        answers = await Crowd(url, None, MODEL_NAME, heard).ask_all(storm.asks)
        return answers, {"cut": len(freed), "freed_within_s": await asyncio.gather(*freed)}


async def _cut(relay: Relay, worker: WatchedWorker, outage_s: float) -> float | None:
    """Cut, wait until nothing runs on the worker and the outage is over, mend. Seconds until nothing ran there; None
    where `PATIENCE_S` was not enough."""
    relay.cut()
    cut_at = time.monotonic()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while _num_live(worker):  # noqa: ASYNC110 - snapshots come without an event
                await asyncio.sleep(0.05)
            freed_s = time.monotonic() - cut_at
            await asyncio.sleep(outage_s - freed_s)
        return round(freed_s, 3)
    except TimeoutError:
        return None
    finally:
        relay.mend()


def _num_live(worker: WatchedWorker) -> int:
    return worker.history[-1][1] if worker.history else 0


Strike = Callable[[Storm, int], Awaitable[tuple[list[Answer], dict[str, Any]]]]
STRIKES: dict[Disturbance, Strike] = {
    Disturbance.KILL: kill_workers,
    Disturbance.FREEZE: freeze_workers,
    Disturbance.GATEWAY: kill_gateway,
    Disturbance.LINK: cut_links,
}


async def disturbed(storm: Storm, disturbance: Disturbance) -> dict[str, Any]:
    """Ask undisturbed and disturbed, and compare. Afterwards all workers are back and idle, with all their cells."""
    begun = time.monotonic()
    crowd = storm.crowd()
    right = await crowd.ask_all(storm.asks)
    undisturbed_s = time.monotonic() - begun
    failed = [answer.error for answer in right if answer.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} undisturbed answers failed: {failed[0]}")
    begun = time.monotonic()
    answers, figures = await STRIKES[disturbance](storm, crowd.num_events)
    disturbed_s = time.monotonic() - begun
    may_fail = disturbance is Disturbance.GATEWAY
    judged = [
        (mine, theirs) for mine, theirs in zip(answers, right, strict=True) if not (may_fail and mine.error is not None)
    ]
    differing = [found for mine, theirs in judged if (found := mine.differences(theirs))]
    await storm.watch.wait_for(storm.num_workers, PATIENCE_S)
    await storm.watch.wait_until_idle(PATIENCE_S)
    return figures | {
        "answers": len(answers),
        "same_as_undisturbed": len(judged) - len(differing),
        "differing": [found[0][:300] for found in differing],
        "farthest_logprob": max(mine.farthest_logprob(theirs) for mine, theirs in judged),
        "tokens": sum(answer.usage[1] for answer in right if answer.usage is not None),
        "undisturbed_s": round(undisturbed_s, 1),
        "disturbed_s": round(disturbed_s, 1),
    }


async def run(disturbances: list[Disturbance], args: argparse.Namespace, service: ServiceProcess, secret: str) -> bool:
    """Whether every bar was met; one result file for each disturbance."""
    all_met = True
    for disturbance in disturbances:
        roads = (Road.HTTP,) if disturbance is Disturbance.LINK else tuple(Road)
        asks = the_asks(args.requests, least_tokens=args.least_tokens, most_tokens=args.most_tokens, roads=roads)
        fields = {"model": args.model, "asks": asks, "num_kills": args.kills, "num_freezes": args.freezes}
        fields |= {"outage_s": args.outage_s}
        async with storm_on(service, secret, seed=args.seed, **fields) as storm:
            figures = await disturbed(storm, disturbance)
        met = not figures["differing"]
        if disturbance is Disturbance.GATEWAY:
            met &= figures["clients_with_an_error"] > 0
            met &= figures["freed_within_s"] is not None and figures["freed_within_s"] <= BAR_GATEWAY_FREED_S
        config = vars(args) | {"num_workers": NUM_WORKERS, "num_gateways": NUM_GATEWAYS, "threads_per_worker": 1}
        record(f"failover_storm-{disturbance}", config, figures | {"met": met}, keep=not args.trial)
        all_met &= met
    return all_met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("disturbances", nargs="*", type=Disturbance, default=list(Disturbance))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freezes", type=int, default=2)
    parser.add_argument("--outage-s", type=float, default=20.0, help="of a link; pings find it within 15")
    parser.add_argument("--least-tokens", type=int, default=16)
    parser.add_argument("--most-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    secret = secrets.token_hex(16)
    with configured_service(settings_of(args.model, secret)) as service:
        return 0 if asyncio.run(run(args.disturbances, args, service, secret)) else 1


if __name__ == "__main__":
    raise SystemExit(main())

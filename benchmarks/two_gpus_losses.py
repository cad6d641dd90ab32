"""One of two workers is killed under load, and then one is frozen: what clients saw, and how long they waited.

Used by `benchmarks.two_gpus`, for speed: a model of full size in its own dtype, so tokens after the loss may differ by
rounding. Exact tokens are `benchmarks.two_gpus_exact`'s.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.client_processes import START_IN_S, ClientProcesses, client_processes
from benchmarks.configured_service import configured_service
from benchmarks.random_model import MODELS, write_model
from benchmarks.two_gpus_plan import NUM_WORKERS, PATIENCE_S, Note, Plan
from benchmarks.two_gpus_service import KINDS, server_of, settings_of
from benchmarks.worker_watch import Watch, WatchedWorker, watched
from cluster.bench import workload
from cluster.bench.online import PATH, Server
from cluster.bench.sse_client import HttpError, post_events
from cluster.bench.workloads import Prompt
from tests.service_process import ServiceProcess

STALL_TIMEOUT_S = 5.0
"""A worker that has work and says nothing for so long is taken for lost."""

NUM_ANSWERS = 30
"""Of gateways in turn, all saying the same."""

STRIKE_AT = 0.5
"""Of the time from the last first token to the first end."""


@dataclass(slots=True)
class Stream:
    """One answer as it came: when (perf_counter), which tokens, how it ended."""

    wanted: int
    sent: float
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    endings: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def whole(self) -> bool:
        """Nothing lost, nothing repeated, one end."""
        return self.error is None and len(self.tokens) == self.wanted and self.endings == ["length"]

    def longest_wait_after(self, moment: float) -> float | None:
        """Seconds between two events of which the later one came after `moment`; None where it had not begun or had
        ended. Tokens that were on their way at that moment still come, so the first wait says nothing."""
        if not self.times or not self.times[0] <= moment < self.times[-1]:
            return None
        return max(b - a for a, b in pairwise(self.times) if b > moment)


def losses(plan: Plan, folder: Path, note: Note) -> None:
    """`note` gets the undisturbed run, that with a killed worker and that with a frozen one."""
    model, secret = write_model(plan.fast_model, folder), secrets.token_hex(16)
    settings = settings_of(plan, model, secret) | {"stall_timeout_s": STALL_TIMEOUT_S, "max_failovers": 10}
    with configured_service(settings) as service, client_processes(plan.num_clients) as clients:
        asyncio.run(_losses(plan, service, secret, clients, note))


async def _losses(plan: Plan, service: ServiceProcess, secret: str, clients: ClientProcesses, note: Note) -> None:
    server = server_of(service)
    prompts = prompts_of(plan)
    async with watched(lambda: service.processes(KINDS["workers"]), secret) as watch:
        await watch.wait_for(NUM_WORKERS, PATIENCE_S)
        await asyncio.to_thread(clients.each, ask_streams, prompts, server, time.perf_counter())  # a warm-up
        begun = time.perf_counter() + START_IN_S
        right = _joined(await asyncio.to_thread(clients.each, ask_streams, prompts, server, begun))
        note(undisturbed=stream_figures(right))
        first, last = max(stream.times[0] for stream in right), min(stream.times[-1] for stream in right)
        strike_after_s = first + STRIKE_AT * (last - first) - begun
        for name, blow in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
            await watch.wait_for(NUM_WORKERS, PATIENCE_S)
            await watch.wait_until_idle(PATIENCE_S)
            await asyncio.to_thread(wait_until_known, service.url)
            begun = time.perf_counter() + START_IN_S
            asked = asyncio.to_thread(clients.each, ask_streams, prompts, server, begun)
            shares, (struck_at, victim, num_live) = await asyncio.gather(
                asked, _strike(watch, begun + strike_after_s, blow)
            )
            figures = struck_figures(right, _joined(shares), struck_at, num_live)
            if blow is signal.SIGSTOP:
                psutil.Process(victim.pid).send_signal(signal.SIGCONT)  # what is frozen cannot end itself
            else:
                await watch.wait_for(NUM_WORKERS, PATIENCE_S)
                figures["replaced_after_s"] = round(time.perf_counter() - struck_at, 2)
            note(**{name: figures})


def wait_until_known(url: str) -> None:
    """Until, as far as many questions tell, every gateway has streams to both workers. Raises `TimeoutError`."""
    deadline, known = time.monotonic() + PATIENCE_S, 0
    while known < NUM_ANSWERS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not every gateway knows {NUM_WORKERS} workers within {PATIENCE_S} s")
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        ready = [line for line in lines if line.startswith("raycomb_workers{") and 'state="ready"' in line]
        known = known + 1 if [float(line.split()[-1]) for line in ready] == [NUM_WORKERS] else 0


def prompts_of(plan: Plan) -> list[Prompt]:
    load, vocab_size = plan.lost, MODELS[plan.fast_model]["vocab_size"]
    items = workload.uniform(load.streams, load.input_len, load.output_len, vocab_size=vocab_size, seed=1)
    return [Prompt(list(item.prompt), item.output_len) for item in items]


async def _strike(watch: Watch, moment: float, blow: signal.Signals) -> tuple[float, WatchedWorker, int]:
    """When it was struck, who, and how many sequences ran there."""
    await asyncio.sleep(moment - time.perf_counter())
    victim = max(watch.alive, key=lambda worker: worker.history[-1][1] if worker.history else 0)
    num_live = victim.history[-1][1] if victim.history else 0
    psutil.Process(victim.pid).send_signal(blow)
    return time.perf_counter(), victim, num_live


def ask_streams(share: Sequence[Prompt], server: Server, start_at: float) -> list[Stream]:
    """In a client's process: all prompts at once, and every token's id."""
    time.sleep(max(0.0, start_at - time.perf_counter()))

    async def all_of_them() -> list[Stream]:
        return list(await asyncio.gather(*(_ask_stream(prompt, server) for prompt in share)))

    return asyncio.run(all_of_them())


async def _ask_stream(prompt: Prompt, server: Server) -> Stream:
    stream = Stream(prompt.output_len, time.perf_counter())
    body = server.body(prompt) | {"return_token_ids": True}
    try:
        async for arrival in post_events(server.target, PATH, body):
            for event in map(json.loads, arrival.payloads):
                if "error" in event:
                    raise HttpError(f"error event: {event['error']}")
                for choice in event["choices"]:
                    if tokens := choice.get("token_ids"):
                        stream.tokens += tokens
                        stream.times.append(arrival.at)
                    if choice["finish_reason"] is not None:
                        stream.endings.append(choice["finish_reason"])
    except (HttpError, OSError, ValueError) as fault:
        stream.error = f"{type(fault).__name__}: {fault}"
    return stream


def _joined(shares: Sequence[Sequence[Stream]]) -> list[Stream]:
    """In the order of the prompts again."""
    streams: list[Stream] = []
    for place in range(max(map(len, shares))):
        streams += [share[place] for share in shares if place < len(share)]
    return streams


def stream_figures(streams: Sequence[Stream]) -> dict[str, Any]:
    begun, num_tokens = min(stream.sent for stream in streams), sum(len(stream.tokens) for stream in streams)
    seconds = max(stream.times[-1] for stream in streams if stream.times) - begun
    gaps = [b - a for stream in streams for a, b in pairwise(stream.times)]
    return {
        "streams": len(streams),
        "whole": sum(stream.whole for stream in streams),
        "errors": sorted({stream.error for stream in streams if stream.error is not None})[:5],
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / seconds, 1),
        "seconds": round(seconds, 3),
        "gap_p50_ms": round(1e3 * statistics.median(gaps), 2),
        "gap_max_s": round(max(gaps), 3),
    }


def struck_figures(right: Sequence[Stream], streams: Sequence[Stream], at: float, num_live: int) -> dict[str, Any]:
    """Those that waited longest after the blow are taken for the `num_live` that ran on the lost worker; `others` are
    disturbed by what the lost ones' past takes to be computed again."""
    waits = [wait for stream in streams if (wait := stream.longest_wait_after(at)) is not None]
    waits.sort(reverse=True)
    lost, others = waits[:num_live], waits[num_live:]
    same = sum(mine.tokens == theirs.tokens for mine, theirs in zip(streams, right, strict=True))
    return stream_figures(streams) | {
        "sequences_on_it": num_live,
        "recovery_p50_s": round(statistics.median(lost), 3) if lost else None,
        "recovery_max_s": round(lost[0], 3) if lost else None,
        "others_wait_max_s": round(others[0], 3) if others else None,
        "same_tokens_as_undisturbed": same,
    }

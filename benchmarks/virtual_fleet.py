"""A fleet in virtual time: real planners and real routers, with steps that cost what a formula says instead of a GPU.

Used by `benchmarks.placement`, and by tests. Nothing here waits, so the outcome is the same on any machine.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cluster.routing.router import Router, WorkerInfo
from planner.limits import Limits
from planner.planner import Planner
from planner.request import Request, Update
from planner.step import Chunk, ChunkOutput, Step, StepResult

VOCAB_SIZE = 50_000
STEP_S = 0.008
TOKEN_S = 0.00006
"""A step takes `STEP_S` and so much for each of its tokens: about an 8B model in bf16 on one large GPU."""


def limits_of(num_cells: int) -> Limits:
    """Of a worker with a pool of that size."""
    return Limits(
        capacity=num_cells,
        context=4096,
        vocab_size=VOCAB_SIZE,
        widths=(1, 2, 4, 8, 16, 32, 64),
        max_num_seqs=64,
        max_batched_tokens=512,
        prefill_chunk_tokens=512,
    )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, and when it comes, in seconds from the beginning."""

    at: float
    request: Request


@dataclass(slots=True)
class Outcome:
    """What became of a load. Per request, in order of arrival: worker, seconds to the first token, cached tokens. Per
    worker: tokens run, and seconds busy."""

    workers: list[int]
    ttft_s: list[float]
    cached_tokens: list[int]
    tokens_run: list[int]
    busy_s: list[float]


class Policy(Protocol):
    """Chooses a worker for the number-th request, and hears what workers report."""

    def choose(self, number: int, request: Request) -> int: ...

    def hear(self, worker: int, planner: Planner, updates: Sequence[tuple[int, Update]]) -> None: ...


class RoundRobin:
    """One after the other."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def choose(self, number: int, request: Request) -> int:
        return number % self._num_workers

    def hear(self, worker: int, planner: Planner, updates: Sequence[tuple[int, Update]]) -> None:
        """Nothing is learned."""


class PowerOfTwoChoices:
    """Of two workers at random the one with fewer requests (Mitzenmacher 2001); Ray Serve's default."""

    def __init__(self, num_workers: int, seed: int) -> None:
        self._num_open = [0] * num_workers
        self._random = random.Random(seed)

    def choose(self, number: int, request: Request) -> int:
        pair = self._random.sample(range(len(self._num_open)), 2)
        worker = min(pair, key=lambda candidate: self._num_open[candidate])
        self._num_open[worker] += 1
        return worker

    def hear(self, worker: int, planner: Planner, updates: Sequence[tuple[int, Update]]) -> None:
        self._num_open[worker] -= sum(update.finish_reason is not None for _, update in updates)


class Homes:
    """Told the whole load beforehand, it gives each prefix one worker for good, the most wanted prefixes first and
    each to the worker with the fewest requests (Graham 1969): what a placement could find cached in pools this small.
    """

    def __init__(self, num_workers: int, prefixes: Sequence[int]) -> None:
        self._prefixes = prefixes
        self._homes: dict[int, int] = {}
        loads = [0] * num_workers
        for prefix, num_requests in Counter(prefixes).most_common():
            self._homes[prefix] = loads.index(min(loads))
            loads[self._homes[prefix]] += num_requests

    def choose(self, number: int, request: Request) -> int:
        return self._homes[self._prefixes[number]]

    def hear(self, worker: int, planner: Planner, updates: Sequence[tuple[int, Update]]) -> None:
        """It knew everything."""


class Routers:
    """Raycomb's own: gateways that share nothing, each with every `num_gateways`-th request."""

    def __init__(self, num_workers: int, num_gateways: int, limits: Limits) -> None:
        self.routers = [Router(max_waiting=limits.max_waiting, offset=offset) for offset in range(num_gateways)]
        self._ids = [f"w{worker:03}" for worker in range(num_workers)]
        for router in self.routers:
            for worker_id in self._ids:
                router.join(worker_info(worker_id, limits))
        self._newest = 0

    def choose(self, number: int, request: Request) -> int:
        router, self._newest = self.routers[number % len(self.routers)], number
        return self._ids.index(router.assign(number, request))

    def hear(self, worker: int, planner: Planner, updates: Sequence[tuple[int, Update]]) -> None:
        changes, snapshot, worker_id = planner.blocks.take_changes(), planner.snapshot(), self._ids[worker]
        for router in self.routers:
            router.observe(worker_id, snapshot, draining=False, newest_request=self._newest)
            router.learn(worker_id, changes)
        for number, update in updates:
            router = self.routers[number % len(self.routers)]
            router.settle(worker_id, number, update.num_cached_tokens if update.tokens else None)


def worker_info(worker_id: str, limits: Limits) -> WorkerInfo:
    return WorkerInfo(
        worker_id=worker_id,
        model="virtual",
        vocab_size=VOCAB_SIZE,
        context=limits.context,
        num_cells=limits.capacity,
        max_prefill_tokens=limits.max_prefill_tokens,
        max_num_seqs=limits.max_num_seqs,
    )


@dataclass(slots=True)
class _Worker:
    planner: Planner
    numbers: dict[int, int] = field(default_factory=dict)  # of requests, by the planner's ids
    step: Step | None = None


def run(arrivals: Sequence[Arrival], policy: Policy, num_workers: int, limits: Limits) -> Outcome:
    """Run a load, in order of arrival, to its end."""
    workers = [_Worker(Planner(limits)) for _ in range(num_workers)]
    outcome = Outcome([], [0.0] * len(arrivals), [0] * len(arrivals), [0] * num_workers, [0.0] * num_workers)
    ends: list[tuple[float, int]] = []  # a heap of (time, worker): steps under way

    def launch(place: int, now: float) -> None:
        worker = workers[place]
        worker.step = worker.planner.plan()
        if worker.step is not None:
            seconds = STEP_S + TOKEN_S * worker.step.num_tokens
            outcome.busy_s[place] += seconds
            outcome.tokens_run[place] += worker.step.num_tokens
            heapq.heappush(ends, (now + seconds, place))

    def settle(place: int, now: float) -> None:
        worker = workers[place]
        assert worker.step is not None
        updates = worker.planner.commit(worker.step, StepResult([_output(chunk) for chunk in worker.step.chunks]))
        news = [(worker.numbers[update.request_id], update) for update in updates]
        for number, update in news:
            if not outcome.ttft_s[number]:
                outcome.ttft_s[number] = now - arrivals[number].at
                outcome.cached_tokens[number] = update.num_cached_tokens
        policy.hear(place, worker.planner, news)
        launch(place, now)

    for number, arrival in enumerate(arrivals):
        while ends and ends[0][0] <= arrival.at:
            now, place = heapq.heappop(ends)
            settle(place, now)
        place = policy.choose(number, arrival.request)
        worker = workers[place]
        outcome.workers.append(place)
        worker.numbers[worker.planner.submit(arrival.request)] = number
        if worker.step is None:
            launch(place, arrival.at)
    while ends:
        now, place = heapq.heappop(ends)
        settle(place, now)
    return outcome


def _output(chunk: Chunk) -> ChunkOutput:
    return ChunkOutput((31 * chunk.sequence_id + chunk.start + chunk.length) % VOCAB_SIZE if chunk.samples else None)


def shared_prefixes(
    num_requests: int, rate: float, *, num_prefixes: int = 20, prefix_tokens: int = 500, seed: int = 0
) -> tuple[list[Arrival], list[int]]:
    """A Poisson load of `rate` requests a second, whose prompts begin with one of the prefixes by Zipf's law (the
    k-th is 1/k as likely as the first); and the prefix of each."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(0, VOCAB_SIZE, (num_prefixes, prefix_tokens))
    weights = 1 / np.arange(1, num_prefixes + 1)
    chosen = rng.choice(num_prefixes, num_requests, p=weights / weights.sum())
    times = np.cumsum(rng.exponential(1 / rate, num_requests))
    arrivals = []
    for at, prefix in zip(times.tolist(), chosen.tolist(), strict=True):
        question = rng.integers(0, VOCAB_SIZE, rng.integers(20, 80))
        prompt = np.concatenate([prefixes[prefix], question])
        arrivals.append(Arrival(at, Request(prompt=prompt, max_tokens=int(rng.integers(16, 128)))))
    return arrivals, chosen.tolist()


def best_cached_tokens(prefixes: Sequence[int], prefix_tokens: int) -> int:
    """What the best placement could find cached: every prefix is computed once, anywhere, and never evicted."""
    return (len(prefixes) - len(set(prefixes))) * prefix_tokens

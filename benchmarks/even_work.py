"""How even the work of two workers is when everything comes at once: `benchmarks.two_gpus_mixed` in virtual time.

Real planners with two steps in flight, real inboxes and real routers; what is made up is time. A step takes what one
took on a GPU (an 8B model, docs/gpu.md), a gateway some time for each request, and each message some time on its way.
Nothing here waits, so the outcome is the same on any machine. `Knowledge` takes from the gateways what they know.

    python -m benchmarks.even_work --keep
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks.record import record
from benchmarks.virtual_fleet import VOCAB_SIZE, worker_info
from cluster.bench import workload
from cluster.routing.placement import ANSWER_WEIGHT
from cluster.routing.router import Router
from planner.limits import Limits, Snapshot
from planner.planner import Planner
from planner.request import Request
from planner.step import ChunkOutput, Step, StepResult
from worker.inbox import Inbox
from worker.serving import TELL_AFTER_S

ROWS: Final = (1, 8, 32, 64, 128, 256)
ROWS_MS: Final = (4.06, 4.29, 4.56, 5.11, 6.60, 9.76)
ROWS_CELLS: Final = 192
"""Milliseconds of a step of so many decodes, each of which read so many cells."""
CELL_S: Final = 3.24e-8
PROMPT_TOKEN_S: Final = 21e-6
LENGTHS: Final = (100, 1000)
LIMITS: Final = Limits(
    capacity=800_000,
    context=4096,
    vocab_size=VOCAB_SIZE,
    max_prefill_tokens=16_640,
    widths=(1, 8, 32, 64, 128, 256, 288),
    max_num_seqs=288,
    max_batched_tokens=16_640,
    prefill_chunk_tokens=2048,
    max_steps_in_flight=2,
    prefix_caching=False,
)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds on average: a gateway's for each request, a message's on its way, and until a gateway looks at one."""

    handling_s: float
    hop_s: float
    lag_s: float


PACES: Final = (Pace(0.0015, 0.001, 0.001), Pace(0.004, 0.001, 0.005), Pace(0.006, 0.002, 0.015))


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What gateways know. Without `inboxes`: what a worker has in its plans when a step ends, with each request of
    theirs on top until the step after the next has ended. Without `answers`: nothing of how long answers will be."""

    inboxes: bool = True
    answers: bool = True


@dataclass(frozen=True, slots=True)
class Split:
    """What fell to each worker, and when the last token of all came."""

    requests: list[int]
    prompt_tokens: list[int]
    answer_tokens: list[int]
    last_s: float

    @property
    def busier_share(self) -> float:
        """Of the answers' tokens."""
        return max(self.answer_tokens) / sum(self.answer_tokens)


def step_s(step: Step) -> float:
    decodes = [chunk for chunk in step.chunks if chunk.length == 1]
    prompt_tokens = step.num_tokens - len(decodes)
    rows_s = float(np.interp(len(decodes), ROWS, ROWS_MS)) / 1e3 - CELL_S * ROWS_CELLS * len(decodes)
    return rows_s + CELL_S * sum(chunk.start + 1 for chunk in decodes) + PROMPT_TOKEN_S * prompt_tokens


def requests_of(num_workers: int, prompts_each: int) -> list[Request]:
    """For each worker the same lengths."""
    items = workload.mixed(prompts_each, LENGTHS, vocab_size=VOCAB_SIZE, seed=0)
    rng = np.random.default_rng(0)
    return [
        Request(prompt=rng.integers(0, VOCAB_SIZE, len(item.prompt)), max_tokens=item.output_len)
        for item in items
        for _ in range(num_workers)
    ]


@dataclass(slots=True)
class _Worker:
    """As `worker.loop` works. `newest`: of each gateway, the last request that came. `numbers` of requests by the
    planner's ids."""

    inbox: Inbox[int]
    newest: list[int]
    planner: Planner = field(default_factory=lambda: Planner(LIMITS))
    numbers: dict[int, int] = field(default_factory=dict)
    in_flight: deque[tuple[Step, float]] = field(default_factory=deque)
    free_at: float = 0.0
    told_at: float = -1.0


class Burst:
    """All requests at once, through gateways that know nothing of each other. Owner of virtual time. A request's number
    says when it comes, and its gateway."""

    def __init__(
        self,
        requests: Sequence[Request],
        num_workers: int,
        num_gateways: int,
        pace: Pace,
        knowledge: Knowledge,
        seed: int,
    ) -> None:
        self._random = random.Random(seed)
        self._requests = dict(enumerate(self._random.sample(requests, len(requests)), start=1))
        self._num_gateways, self._pace, self._knowledge = num_gateways, pace, knowledge
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._now = self._last_s = 0.0
        self._delivered_at: dict[tuple[str, int, int], float] = {}
        self._placed: dict[int, int] = {}
        self._sent_in_step: dict[int, int] = {}
        self._ids = [f"{self._random.getrandbits(64):016x}" for _ in range(num_workers)]
        self._routers = [Router(max_waiting=LIMITS.max_waiting, offset=offset) for offset in range(num_gateways)]
        self._steps_heard = [[0] * num_workers for _ in range(num_gateways)]
        self._workers = [_Worker(Inbox(len(requests)), [0] * num_gateways) for _ in range(num_workers)]
        for worker_id, worker in zip(self._ids, self._workers, strict=True):
            worker.inbox.advise(1.0, worker.planner.snapshot())
            for gateway, router in enumerate(self._routers):
                worker.inbox.connect(gateway)
                router.join(worker_info(worker_id, LIMITS))
        free_at = [0.0] * num_gateways
        for number in self._requests:
            gateway = number % num_gateways
            free_at[gateway] += self._random.expovariate(1 / pace.handling_s)
            self._at(free_at[gateway], partial(self._assign, gateway, number))

    def run(self, *, until_placed: bool = False) -> Split:
        """To the last token, or until the last request has its worker."""
        while self._events and not (until_placed and len(self._placed) == len(self._requests)):
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        places = range(len(self._workers))
        of_each = [[self._requests[number] for number, at in self._placed.items() if at == place] for place in places]
        return Split(
            requests=[len(each) for each in of_each],
            prompt_tokens=[sum(len(request.prompt) for request in each) for each in of_each],
            answer_tokens=[sum(request.max_tokens for request in each) for each in of_each],
            last_s=self._last_s,
        )

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _send(self, road: tuple[str, int, int], lag_s: float, happen: Callable[[], None]) -> None:
        """A message; those of one road come in order."""
        hop_s = self._pace.hop_s * self._random.uniform(0.5, 1.5) + lag_s * self._random.uniform(0, 2)
        self._delivered_at[road] = max(self._now + hop_s, self._delivered_at.get(road, 0.0))
        self._at(self._delivered_at[road], happen)

    def _assign(self, gateway: int, number: int) -> None:
        request = self._requests[number]
        asked = request if self._knowledge.answers else replace(request, max_tokens=1)
        place = self._ids.index(self._routers[gateway].assign(number, asked))
        self._placed[number] = place
        self._sent_in_step[number] = self._steps_heard[gateway][place]
        self._send(("there", gateway, place), 0.0, partial(self._submit, gateway, place, number))

    def _submit(self, gateway: int, place: int, number: int) -> None:
        worker = self._workers[place]
        worker.inbox.submit(gateway, number, self._requests[number])
        worker.newest[gateway] = number
        if not worker.in_flight:
            self._turn(place)
        if self._knowledge.inboxes:
            self._at(self._now + TELL_AFTER_S, partial(self._tell_if_due, place, self._now))

    def _turn(self, place: int) -> None:
        worker = self._workers[place]
        for submit in worker.inbox.take(wait=False).submits:
            worker.numbers[worker.planner.submit(submit.request)] = submit.key
        step = worker.planner.plan()
        if step is not None:
            worker.free_at = max(worker.free_at, self._now) + step_s(step)
            worker.in_flight.append((step, worker.free_at))
        if worker.in_flight and (step is None or len(worker.in_flight) == LIMITS.max_steps_in_flight):
            self._at(worker.in_flight[0][1], partial(self._settle, place))
        elif step is not None:
            self._turn(place)

    def _settle(self, place: int) -> None:
        worker = self._workers[place]
        step, _ = worker.in_flight.popleft()
        outputs = [ChunkOutput(0 if chunk.samples else None) for chunk in step.chunks]
        updates = worker.planner.commit(step, StepResult(outputs))
        worker.inbox.advise(1.0, worker.planner.snapshot())
        self._last_s = self._now
        self._tell(place, [worker.numbers[update.request_id] for update in updates])
        self._turn(place)

    def _tell_if_due(self, place: int, since: float) -> None:
        if self._workers[place].told_at < since:
            self._tell(place, [])

    def _tell(self, place: int, answered: Sequence[int]) -> None:
        worker = self._workers[place]
        worker.told_at = self._now
        snapshot = worker.inbox.snapshot if self._knowledge.inboxes else worker.planner.snapshot()
        assert snapshot is not None
        if not self._knowledge.answers:
            snapshot = replace(snapshot, answer_tokens=0)
        for gateway in range(self._num_gateways):
            own = [number for number in answered if number % self._num_gateways == gateway]
            heard = partial(self._hear, gateway, place, snapshot, worker.newest[gateway], own)
            self._send(("back", gateway, place), self._pace.lag_s, heard)

    def _hear(self, gateway: int, place: int, snapshot: Snapshot, newest: int, answered: Sequence[int]) -> None:
        self._steps_heard[gateway][place] = snapshot.step
        if not self._knowledge.inboxes:
            seen = [n for n, at in self._placed.items() if at == place and self._sent_in_step[n] + 2 <= snapshot.step]
            newest = max((number for number in seen if number % self._num_gateways == gateway), default=0)
        router, worker_id = self._routers[gateway], self._ids[place]
        router.observe(worker_id, snapshot, draining=False, newest_request=newest)
        for number in answered:
            router.settle(worker_id, number)


VARIATIONS: Final = {
    "as_it_is": Knowledge(),
    "answers_unknown": Knowledge(answers=False),
    "inboxes_unknown": Knowledge(inboxes=False),
    "neither": Knowledge(inboxes=False, answers=False),
}


def figures_of(num_gateways: int, prompts_each: int, num_seeds: int) -> dict[str, Any]:
    """Of each variation: the busier worker's share of the answers' tokens, and how many times one worker's rate two
    give. Each seed has the next pace."""
    alone_s = Burst(requests_of(1, prompts_each), 1, num_gateways, PACES[0], Knowledge(), 0).run().last_s
    figures: dict[str, Any] = {"one_worker_s": round(alone_s, 3)}
    requests = requests_of(2, prompts_each)
    for name, knowledge in VARIATIONS.items():
        splits = [
            Burst(requests, 2, num_gateways, PACES[seed % len(PACES)], knowledge, seed).run()
            for seed in range(num_seeds)
        ]
        ratios = [2 * alone_s / split.last_s for split in splits]
        figures[name] = {
            "ratio_mean": round(fmean(ratios), 3),
            "ratio_least": round(min(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
            "busier_share_mean": round(fmean(split.busier_share for split in splits), 4),
            "busier_share_most": round(max(split.busier_share for split in splits), 4),
            "requests": [split.requests for split in splits],
            "prompt_tokens": [split.prompt_tokens for split in splits],
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts-each", type=int, default=256, help="for each worker")
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    args = parser.parse_args()
    figures = {f"gateways_{count}": figures_of(count, args.prompts_each, args.seeds) for count in (1, 4)}
    config = {
        "num_workers": 2,
        "prompts_each": args.prompts_each,
        "lengths": LENGTHS,
        "seeds": args.seeds,
        "paces": [asdict(pace) for pace in PACES],
        "tell_after_s": TELL_AFTER_S,
        "answer_weight": ANSWER_WEIGHT,
        "rows": ROWS,
        "rows_ms": ROWS_MS,
        "cell_s": CELL_S,
        "prompt_token_s": PROMPT_TOKEN_S,
    }
    record("even_work", config, figures, keep=args.keep)


if __name__ == "__main__":
    main()

"""The host's part of a decode step: what planner, desk and engine take, in microseconds of a core's time.

The engine's own loop runs over an executor that answers at once, two steps in flight. A step's time is told by phase,
as the thread's processor time, so that a machine which does other things too tells the same:

* *mail*: looking for what clients have asked; *plan*: the next step, and its chunks; *commit*: the outcome of the one
  before, and its tallies; *note*: the desk's books; *report*: a snapshot of the state, and one report to the client.
* What the executor takes is left out: its own part of the host's work is `worker.cuda.executor`'s.

Beside it, what a report of as many updates costs who reads it, on another thread of the same process: an offline run;
a worker's message to its gateway (`add` and `next` of the outbox), and its bytes; and what it costs the gateway to
read them (`read`).

    python -m benchmarks.host_step [--beside CHECKOUT]

Each round is a process of its own; with `--beside`, those of this checkout and of the other one take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
from opentelemetry.trace import NoOpTracer

from benchmarks.record import record
from cluster.offline.engine import running
from planner.limits import Limits, Snapshot
from planner.request import Request, Update
from planner.step import ChunkOutput, Step, StepResult
from protos import worker_pb2 as pb
from tests.fakes import fake_info
from worker.client import Client, StepReport
from worker.engine import Engine
from worker.inbox import Inbox, Mail
from worker.loop import Loop
from worker.outbox import Outbox
from worker.wire import update_from_proto

ROWS: Final = (1, 64, 256)
PROMPT_TOKENS: Final = 128
WARM_UP_STEPS: Final = 40
STEPS: Final = 240
REPORTS: Final = 240
TOKEN: Final = 5
STOPS: Final = frozenset({2, 3})
LIMITS: Final = Limits(
    capacity=600_000,
    context=4096,
    vocab_size=152_000,
    max_prefill_tokens=16_640,
    widths=(1, 2, 4, 8, 16, 32, 64, 128, 192, 256),
    max_num_seqs=256,
    max_batched_tokens=16_640,
    prefill_chunk_tokens=2048,
    max_steps_in_flight=2,
    prefix_caching=False,
)
CASES: Final = {
    "plain": (LIMITS, frozenset[int]()),
    "prefix_caching": (replace(LIMITS, prefix_caching=True), frozenset[int]()),
    "stop_tokens": (LIMITS, STOPS),
}
Figures = dict[str, dict[str, float]]
PHASES: Final = ("mail", "plan", "commit", "note", "report")
INFO: Final = fake_info(
    name="ready",
    vocab_size=LIMITS.vocab_size,
    context=LIMITS.context,
    max_prefill_tokens=LIMITS.max_prefill_tokens,
    min_prefill_tokens=LIMITS.min_prefill_tokens,
    widths=LIMITS.widths,
    num_cells=LIMITS.capacity,
    vector_size=None,
)


class PhaseClock:
    """Each moment belongs to one phase, the innermost that was entered."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._phase = ""
        self._since = time.thread_time()
        self._seconds: dict[str, float] = {}

    def enter(self, phase: str) -> str:
        """Returns the phase that ends, to be entered again by whoever interrupted it."""
        now = time.thread_time()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        before, self._phase, self._since = self._phase, phase, now
        return before

    def end_step(self) -> None:
        self.enter("")
        self.steps.append(self._seconds)
        self._seconds = {}

    def figures(self) -> dict[str, float]:
        """Microseconds of the median step, by phase; `sum`: of the step whose sum is the median."""
        steps = self.steps[WARM_UP_STEPS : WARM_UP_STEPS + STEPS]
        times = {phase: median(step.get(phase, 0.0) for step in steps) for phase in PHASES}
        times["sum"] = median(sum(step.get(phase, 0.0) for phase in PHASES) for step in steps)
        return {phase: round(1e6 * seconds, 1) for phase, seconds in times.items()}


class ReadyExecutor:
    """A `worker.executor.Executor` whose steps are done when they are launched. Calls `done` upon the launch of the
    last of `num_steps`."""

    info = INFO
    max_steps_in_flight = 2
    num_beats = 0
    adapters = None

    def __init__(self, clock: PhaseClock, num_steps: int, done: Callable[[], None]) -> None:
        self._clock = clock
        self._num_left = num_steps
        self._done = done
        self._in_flight: deque[Step] = deque()

    def prepare(self, request: Request) -> None:
        """Nothing is slow to make."""

    def launch(self, step: Step) -> None:
        before = self._clock.enter("executor")
        self._in_flight.append(step)
        self._num_left -= 1
        if self._num_left == 0:
            self._done()
        self._clock.enter(before)

    def collect(self) -> StepResult:
        before = self._clock.enter("executor")
        step = self._in_flight.popleft()
        result = StepResult([ChunkOutput(TOKEN if chunk.samples else None) for chunk in step.chunks])
        self._clock.enter(before)
        return result

    def close(self) -> None:
        """Nothing is held."""


class TimedLoop(Loop):
    """The engine's loop, which tells a clock what it is at."""

    def __init__(self, clock: PhaseClock, executor: ReadyExecutor, limits: Limits, inbox: Inbox[Client]) -> None:
        super().__init__(executor, limits, inbox, tracer=NoOpTracer(), check_cells=False)
        self._clock = clock

    def _read_mail(self) -> Mail[Client]:
        self._clock.end_step()
        self._clock.enter("mail")
        return super()._read_mail()

    def _launch(self) -> Step | None:
        self._clock.enter("plan")
        return super()._launch()

    def _settle(self) -> None:
        self._clock.enter("commit")
        super()._settle()

    def _note(self, updates: Collection[Update]) -> None:
        before = self._clock.enter("note")
        super()._note(updates)
        self._clock.enter(before)

    def _report(self) -> None:
        self._clock.enter("report")
        super()._report()


def step_times(limits: Limits, stop_token_ids: frozenset[int], rows: int) -> dict[str, float]:
    """Of steps in which `rows` sequences decode and none ends."""
    clock, inbox, num_steps = PhaseClock(), Inbox[Client](rows), WARM_UP_STEPS + STEPS + 2
    loop = TimedLoop(clock, ReadyExecutor(clock, num_steps, lambda: inbox.stop("measured")), limits, inbox)
    client = Client(inbox, lambda report: None)
    inbox.connect(client)
    for key in range(rows):
        client.submit(key, decoding(num_steps + 1, stop_token_ids))
    loop.run()
    loop.close()
    return clock.figures()


def report_times(rows: int) -> dict[str, float]:
    """Microseconds of the reader of one report of `rows` updates of one token each."""
    outbox = Outbox()
    updates = tuple((row + 1, Update(row + 1, 0, (TOKEN,))) for row in range(rows))
    report = StepReport(updates, Snapshot(*[0] * 8))
    for row in range(rows):
        outbox.open(row + 1, 1)
    times: dict[str, list[float]] = {"add": [], "next": [], "bytes": [], "read": []}

    async def write() -> None:
        for number in range(REPORTS):
            at = [time.thread_time()]
            outbox.add(report, draining=False)
            at.append(time.thread_time())
            message = await outbox.next()
            at.append(time.thread_time())
            assert message is not None
            sent = message.SerializeToString()
            at.append(time.thread_time())
            read = [update_from_proto(each) for each in pb.StepUpdates.FromString(sent).updates]
            at.append(time.thread_time())
            assert read == [update for _, update in updates]
            for part, (begun, ended) in zip(times.values(), pairwise(at), strict=True):
                part.append(ended - begun)
            outbox.note_sent()
            outbox.note_read(number + 1)

    asyncio.run(write())
    medians_s = {"offline": offline_time(rows)} | {name: median(part) for name, part in times.items()}
    return {name: round(1e6 * seconds, 1) for name, seconds in medians_s.items()}


def offline_time(rows: int) -> float:
    """Processor seconds of an offline run's thread for one report, while all sequences decode; its user keeps none."""
    executor = ReadyExecutor(PhaseClock(), 0, lambda: None)
    engine = Engine(executor, LIMITS, inbox_size=rows, on_death=lambda error: None)
    times: list[float] = []
    with running(engine) as offline:
        at = time.thread_time()
        requests = [(key, decoding(REPORTS)) for key in range(rows)]
        for number, _ in enumerate(offline.run(requests, rows), start=1):
            if number % rows == 0:
                now = time.thread_time()
                times.append(now - at)
                at = now
    return median(times[WARM_UP_STEPS:])


def decoding(max_tokens: int, stop_token_ids: frozenset[int] = frozenset()) -> Request:
    """A request that does nothing but decode for so many steps, after a short prompt."""
    prompt = np.arange(1000, 1000 + PROMPT_TOKENS, dtype=np.int64)
    return Request(prompt, max_tokens, stop_token_ids=stop_token_ids)


def one_round() -> Figures:
    steps = {
        f"{case}_{rows}": step_times(limits, stops, rows) for case, (limits, stops) in CASES.items() for rows in ROWS
    }
    return steps | {f"report_{rows}": report_times(rows) for rows in ROWS}


def round_of(checkout: Path) -> Figures:
    """In a process of its own, with that checkout's code."""
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--one-round"]
    told = subprocess.check_output(command, env=os.environ | {"PYTHONPATH": str(checkout)}, cwd=checkout)
    figures: Figures = json.loads(told)
    return figures


def medians(rounds: Sequence[Figures]) -> Figures:
    return {
        case: {phase: round(median(each[case][phase] for each in rounds), 1) for phase in phases}
        for case, phases in rounds[0].items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--beside", type=Path, help="another checkout, whose code takes turns with this one's")
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    parser.add_argument("--one-round", action="store_true", help="measure once, in this process, and print that")
    args = parser.parse_args()
    if args.one_round:
        print(json.dumps(one_round()))
        return
    here = Path(__file__).resolve().parents[1]
    sides = {"here": here} if args.beside is None else {"here": here, "beside": args.beside.resolve()}
    turns = [{name: round_of(checkout) for name, checkout in sides.items()} for _ in range(args.rounds)]
    config = {"unit": "us", "rounds": args.rounds, "steps": STEPS, "warm_up_steps": WARM_UP_STEPS}
    config |= {"prompt_tokens": PROMPT_TOKENS, "limits": asdict(LIMITS), "stop_token_ids": sorted(STOPS)}
    record("host_step", config, {name: medians([turn[name] for turn in turns]) for name in sides}, keep=args.keep)


if __name__ == "__main__":
    main()

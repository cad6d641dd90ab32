"""What Python's collector of garbage takes from a worker's engine, and what it takes once its process is settled.

An engine of 256 rows over an executor that answers at once, in a process that has a worker's modules and a vocabulary.
Told is how often each generation was collected in so many steps, how long that took together and at most: while it
does, no thread of the process goes on. Each side is a process of its own, and sides take turns.

    python -m benchmarks.collector_pauses --model smollm2-135m [--keep]
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from statistics import median
from typing import Any, Final

from benchmarks.host_step import LIMITS, PhaseClock, ReadyExecutor, decoding
from benchmarks.record import record
from cluster.checkpoints import resolve
from cluster.language.text import load_text
from cluster.offline.engine import running
from worker.engine import Engine
from worker.heap import settled

ROWS: Final = 256
WARM_UP_STEPS: Final = 100
SIDES: Final = ("as it is", "settled")


class Pauses:
    """By generation, the seconds of each collection since `begin`."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self._began = 0.0
        gc.callbacks.append(self._note)

    def begin(self) -> None:
        self.seconds.clear()

    def figures(self) -> dict[str, dict[str, float]]:
        return {
            f"generation_{generation}": {
                "count": len(took), "total_ms": 1e3 * sum(took), "longest_ms": 1e3 * max(took, default=0.0),
            }
            for generation, took in sorted(self.seconds.items())
        }  # fmt: skip

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds[info["generation"]].append(time.perf_counter() - self._began)


def one_side(side: str, model: str, num_steps: int) -> dict[str, Any]:
    import cluster.worker  # noqa: F401 - what a worker has loaded
    import worker.program  # noqa: F401

    vocabulary = load_text(resolve(model)).vocabulary()
    pauses = Pauses()
    executor = ReadyExecutor(PhaseClock(), 0, lambda: None)
    engine = Engine(executor, LIMITS, inbox_size=ROWS, on_death=lambda error: None)
    began = 0.0
    with running(engine) as offline, settled() if side == "settled" else nullcontext():
        requests = [(key, decoding(num_steps + WARM_UP_STEPS)) for key in range(ROWS)]
        for number, _ in enumerate(offline.run(requests, ROWS), start=1):
            if number == ROWS * WARM_UP_STEPS:
                pauses.begin()
                began = time.perf_counter()
        elapsed = time.perf_counter() - began
    assert vocabulary.tokens, "it lived until the end"
    return {"step_ms": 1e3 * elapsed / num_steps, "objects": len(gc.get_objects()), **pauses.figures()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="write a dated result file")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side is not None:
        print(json.dumps(one_side(args.side, args.model, args.steps)))
        return
    turns: dict[str, list[Any]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side, told in turns.items():
            command = [sys.executable, "-m", "benchmarks.collector_pauses", "--side", side]
            command += ["--model", args.model, "--steps", str(args.steps)]
            told.append(json.loads(subprocess.check_output(command).splitlines()[-1]))
    figures = {
        side: {"median_step_ms": median(each["step_ms"] for each in told), "rounds": told}
        for side, told in turns.items()
    }
    config = {"model": args.model, "rows": ROWS, "steps": args.steps, "thresholds": gc.get_threshold()}
    record("collector-pauses", config, figures, keep=args.keep)


if __name__ == "__main__":
    main()

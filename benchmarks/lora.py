"""What adapters cost on a CPU: milliseconds of a decode step and of a first prefill, without any, with one, with eight.

Adapters have the given rank in all seven projections, and random numbers; the ways take turns, so that a machine that
is busy for a while is so for all of them.

    python -m benchmarks.lora --model smollm2-135m --keep
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.record import record
from cluster.checkpoints import resolve
from planner.planner import Planner
from planner.request import Adapter, Request, SamplingParams
from tests.tiny_adapters import ALL_MODULES, save_tiny_adapter
from worker.config import EngineConfig
from worker.executor import Executor, limits_for
from worker.models.config import ModelConfig
from worker.program import build_executor, load_program

NUM_ADAPTERS = 8
PROMPT_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0)


def load(executor: Executor, model: ModelConfig, rank: int) -> list[Adapter]:
    slots = executor.adapters
    assert slots is not None
    adapters = []
    changes = {"target_modules": list(ALL_MODULES), "r": rank}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_ADAPTERS):
            saved = save_tiny_adapter(Path(folder) / str(number), model, number, strength=0.02, changes=changes)
            matrices = slots.read(saved)
            adapters.append(Adapter(str(number), matrices.revision))
            slots.put(number, adapters[-1], matrices)
    return adapters


def step_times(
    executor: Executor, config: EngineConfig, adapters: Sequence[Adapter | None], num_steps: int
) -> list[float]:
    """Seconds of each step: first the prefill of one prompt for each of `adapters`, then decodes."""
    planner = Planner(limits_for(config, executor.info))
    random = np.random.default_rng(1)
    for adapter in adapters:
        prompt = random.integers(0, executor.info.vocab_size, PROMPT_TOKENS)
        planner.submit(Request(prompt, num_steps, GREEDY, adapter=adapter))
    times = []
    while (step := planner.plan()) is not None:
        began = time.perf_counter()
        executor.launch(step)
        result = executor.collect()
        times.append(time.perf_counter() - began)
        planner.commit(step, result)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    told = {"model": str(resolve(args.model)), "device": "cpu", "num_threads": args.num_threads, "max_cells": 4096}
    config = EngineConfig(**told, enable_lora=True, max_loras=NUM_ADAPTERS, max_lora_rank=args.rank)
    executor = build_executor(config)
    adapters = load(executor, load_program(config).decoder.config, args.rank)
    ways: dict[str, list[Adapter | None]] = {
        "1 row, no adapter": [None],
        "1 row, its adapter": [adapters[0]],
        "8 rows, no adapter": [None] * 8,
        "8 rows, one adapter": [adapters[0]] * 8,
        "8 rows, four adapters and none": [*adapters[:4], *[None] * 4],
        "8 rows, eight adapters": list(adapters),
    }
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(args.rounds + 1):
        for name, chosen in ways.items():
            times = step_times(executor, config, chosen, num_steps=16)
            if number:  # the first round warms up
                found[name].append(times)
    figures = {
        name: {
            "decode_ms": round(1e3 * statistics.median(t for times in runs for t in times[1:]), 2),
            "prefill_ms": round(1e3 * statistics.median(times[0] for times in runs), 2),
        }
        for name, runs in found.items()
    }
    record("lora", vars(args) | {"prompt_tokens": PROMPT_TOKENS}, figures, keep=args.keep)
    executor.close()


if __name__ == "__main__":
    main()

"""What adapters cost: milliseconds of a decode step and of a first prefill, without any, with one, with eight.

Adapters have the given rank in all seven projections, and random numbers; the ways take turns, so that a machine that
is busy for a while is so for all of them. On a GPU a model of that shape with random weights runs beside the same one
without `enable_lora`, with two steps in flight.

    python -m benchmarks.lora --model smollm2-135m --keep
    python -m benchmarks.lora --device cuda --model qwen3-0.6b --keep
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.random_model import MODELS, write_model
from benchmarks.record import record
from cluster.checkpoints import resolve
from planner.planner import Planner
from planner.request import Adapter, Request, SamplingParams
from planner.step import Step
from tests.tiny_adapters import ALL_MODULES, save_tiny_adapter
from worker.config import EngineConfig
from worker.executor import Executor, limits_for
from worker.models.config import ModelConfig, read_config
from worker.program import build_executor, load_program

NUM_ADAPTERS = 8
GREEDY = SamplingParams(temperature=0.0)


class Way(NamedTuple):
    """An engine, and the adapter of each row."""

    executor: Executor
    adapters: list[Adapter | None]


class Load(NamedTuple):
    """Rows of the wide ways, and what each reads and says."""

    num_rows: int
    prompt_tokens: int
    num_tokens: int


LOADS = {"cpu": Load(8, 32, 16), "cuda": Load(32, 128, 128)}


def load(executor: Executor, model: ModelConfig, rank: int) -> list[Adapter]:
    slots = executor.adapters
    assert slots is not None
    adapters = []
    changes = {"target_modules": list(ALL_MODULES), "r": rank}
    for number in range(NUM_ADAPTERS):
        with tempfile.TemporaryDirectory() as folder:
            saved = save_tiny_adapter(Path(folder) / "adapter", model, number, strength=0.02, changes=changes)
            matrices = slots.read(saved)
        adapters.append(Adapter(str(number), matrices.revision))
        slots.put(number, adapters[-1], matrices)
    return adapters


def step_times(way: Way, config: EngineConfig, load: Load) -> list[float]:
    """Seconds from one step's end to the next one's: first the prefill of one prompt for each row, then decodes."""
    executor = way.executor
    limits = limits_for(config, executor.info, executor.max_steps_in_flight)
    planner, in_flight = Planner(limits), deque[Step]()
    random = np.random.default_rng(1)
    for adapter in way.adapters:
        prompt = random.integers(0, executor.info.vocab_size, load.prompt_tokens)
        planner.submit(Request(prompt, load.num_tokens, GREEDY, adapter=adapter))
    times, last = [], time.perf_counter()
    while (step := planner.plan()) is not None or in_flight:
        if step is not None:
            executor.launch(step)
            in_flight.append(step)
        if step is None or len(in_flight) == limits.max_steps_in_flight:
            planner.commit(in_flight.popleft(), executor.collect())
            last, before = time.perf_counter(), last
            times.append(last - before)
    return times


def ways_of(args: argparse.Namespace, told: dict[str, Any], load_: Load) -> tuple[EngineConfig, dict[str, Way]]:
    adapted = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": args.rank}
    config = EngineConfig(**told, **adapted)
    executor = build_executor(config)
    adapters = load(executor, _model(config), args.rank)
    rows = load_.num_rows
    turns: list[Adapter | None] = [adapters[row % NUM_ADAPTERS] for row in range(rows)]
    ways = {
        "1 row, no adapter": Way(executor, [None]),
        "1 row, its adapter": Way(executor, [adapters[0]]),
        f"{rows} rows, no adapter": Way(executor, [None] * rows),
        f"{rows} rows, one adapter": Way(executor, [adapters[0]] * rows),
        f"{rows} rows, four adapters and none": Way(
            executor, [adapters[row % 4] if row % 2 else None for row in range(rows)]
        ),
        f"{rows} rows, eight adapters": Way(executor, turns),
    }
    if args.device == "cuda":
        plain = build_executor(EngineConfig(**told))
        ways["1 row, no enable_lora"] = Way(plain, [None])
        ways[f"{rows} rows, no enable_lora"] = Way(plain, [None] * rows)
    return config, ways


def _model(config: EngineConfig) -> ModelConfig:
    return read_config(Path(config.model)) if config.device == "cuda" else load_program(config).decoder.config


def figures_of(found: Sequence[Sequence[float]], num_rows: int) -> dict[str, float]:
    decode_s = statistics.median(t for times in found for t in times[1:])
    return {
        "decode_ms": round(1e3 * decode_s, 3),
        "decode_tokens_per_s": round(num_rows / decode_s, 1),
        "prefill_ms": round(1e3 * statistics.median(times[0] for times in found), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help=f"on a GPU one of {', '.join(MODELS)}")
    parser.add_argument("--device", choices=LOADS, default="cpu")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    load_ = LOADS[args.device]
    with tempfile.TemporaryDirectory() as parent:
        told: dict[str, Any] = {"device": args.device, "num_threads": args.num_threads, "max_cells": 4096}
        if args.device == "cuda":
            told["model"] = str(write_model(args.model, Path(parent)))
            cells = load_.num_rows * (load_.prompt_tokens + load_.num_tokens)
            told |= {"load_format": "dummy", "max_cells": 2 * cells, "max_num_seqs": load_.num_rows}
            told |= {"max_model_len": 1024, "max_prefill_tokens": 8192, "prefix_caching": False, "swap_space": 0}
        else:
            told["model"] = str(resolve(args.model))
        config, ways = ways_of(args, told, load_)
        found: dict[str, list[list[float]]] = {name: [] for name in ways}
        for number in range(args.rounds + 1):
            for name, way in ways.items():
                times = step_times(way, config, load_)
                if number:  # the first round warms up
                    found[name].append(times)
    figures = {name: figures_of(found[name], len(way.adapters)) for name, way in ways.items()}
    name = "lora" if args.device == "cpu" else f"lora-{args.device}-{args.model}"
    record(name, vars(args) | load_._asdict(), figures, keep=args.keep)
    for executor in {id(way.executor): way.executor for way in ways.values()}.values():
        executor.close()


if __name__ == "__main__":
    main()

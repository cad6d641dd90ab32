"""SmolLM2-135M in float32 on the CPU: `transformers.generate` against Raycomb, one sequence and sixteen.

One run on one machine measures transformers, Raycomb's engine, Raycomb through its whole HTTP stack, and what the
machine can do at best. All are greedy, get the same prompts and generate the same numbers of tokens; a rate is
generated tokens over the whole time, prefill included. Sixteen prompts come twice: of equal length, so that
transformers' batch is as good as a batch can be, and of mixed lengths, which it pads. Each side has a process of its
own and the machine to itself; transformers has its turn before and after the others, so that a drift would show.

    python -m benchmarks.against_transformers
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.record import record
from benchmarks.served import served
from cluster.bench import workload
from cluster.bench.offline import GREEDY
from cluster.bench.online import Server, run_load
from cluster.bench.sse_client import Target
from cluster.bench.workload import Item
from cluster.bench.workloads import Prompt
from cluster.checkpoints import resolve
from cluster.offline.engine import OfflineEngine, open_offline
from cluster.serving.front import free_ports
from planner.request import Request, Update
from worker.config import EngineConfig
from worker.executor import ProgramInfo
from worker.roofline import decode_floor_s, measure_bandwidth, measure_matmul_rate

MODEL = "smollm2-135m"
BATCH = 16
BARS = {"single": 2.0, "equal16": 2.0, "padded16": 2.0}
SHORTEST = 16  # of the padded prompts; the longest have twice `--input-len` less this many tokens
Answers = list[list[int]]
Loads = dict[str, list[Item]]


@dataclass(frozen=True)
class Turn:
    """What one process measured: rates of each repeat and the answers of the warm-up, by load."""

    rates: dict[str, list[float]]
    answers: dict[str, Answers]
    floors: dict[str, Any] = field(default_factory=dict)


class Transformers:
    """The other side: the model as its users load and run it."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    def generate(self, items: Sequence[Item]) -> Answers:
        """All prompts in one batch, shorter ones padded on the left."""
        longest = max(len(item.prompt) for item in items)
        gaps = [longest - len(item.prompt) for item in items]
        ids = torch.tensor([[0] * gap + list(item.prompt) for gap, item in zip(gaps, items, strict=True)])
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in gaps])
        new = items[0].output_len
        with torch.inference_mode():
            out = self._model.generate(
                ids, attention_mask=mask, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0
            )
        answers: Answers = out[:, longest:].tolist()
        return answers


def run_engine(engine: OfflineEngine, items: Sequence[Item]) -> Answers:
    """Our engine in this process; all prompts at once."""
    requests = [
        (key, Request(torch.tensor(item.prompt).numpy(), item.output_len, GREEDY)) for key, item in enumerate(items)
    ]
    answers: Answers = [[] for _ in items]
    for news in engine.run(requests, len(items)):
        if not isinstance(news.update, Update) or news.update.error is not None:
            raise RuntimeError(f"request {news.key} was not answered: {news.update}")
        answers[news.key] += news.update.tokens
    return answers


def run_http(url: str, items: Sequence[Item]) -> None:
    """The whole stack, every prompt from a client of its own."""
    prompts = [Prompt(list(item.prompt), item.output_len) for item in items]
    result = asyncio.run(run_load(Server(Target.parse(url), MODEL), prompts))
    if sum(record.num_output for record in result.good) != workload.total_output(items):
        raise RuntimeError(f"the load failed: { {record.error for record in result.records} }")


def rate(run: Callable[[], object], items: Sequence[Item]) -> float:
    """Generated tokens a second."""
    start = time.perf_counter()
    run()
    return workload.total_output(items) / (time.perf_counter() - start)


def measure_transformers(args: argparse.Namespace, path: Path, loads: Loads) -> Turn:
    torch.set_num_threads(args.threads)
    model = Transformers(path)
    return _turn(model.generate, loads, args.repeats)


def measure_engine(args: argparse.Namespace, path: Path, loads: Loads) -> Turn:
    torch.set_num_threads(args.threads)
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", prefix_caching=False, num_threads=args.threads
    )
    with open_offline(config) as engine:
        turn = _turn(partial(run_engine, engine), loads, args.repeats)
        return replace(turn, floors=measure_floors(engine.info, args))


def _turn(run: Callable[[Sequence[Item]], Answers], loads: Loads, repeats: int) -> Turn:
    answers = {name: run(items) for name, items in loads.items()}  # the warm-up, too
    rates = {name: [rate(partial(run, items), items) for _ in range(repeats)] for name, items in loads.items()}
    return Turn(rates, answers)


def measure_http(args: argparse.Namespace, loads: Loads) -> dict[str, list[float]]:
    """Our whole stack, with one worker that has all threads."""
    words = [
        *("serve", MODEL, "--num-workers", "1", "--num-gateways", "1", "--host", "127.0.0.1", "--device", "cpu"),
        *("--dtype", "float32", "--num-threads", str(args.threads), "--no-prefix-caching"),
    ]
    rates: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as logs,
        served("cluster.cli", words, port=free_ports(1)[0], log=Path(logs) / "serve.log") as url,
    ):
        for items in loads.values():
            run_http(url, items)
        for _ in range(args.repeats):
            for name, items in loads.items():
                rates.setdefault(name, []).append(rate(partial(run_http, url, items), items))
    return rates


def measure_floors(info: ProgramInfo, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second that no implementation can pass on this machine: by the bytes of a step, and by its products at
    the rate that this machine's own matrix product reaches at that many rows."""
    bandwidth = measure_bandwidth("cpu")
    floors: dict[str, Any] = {"copy_bytes_per_s": bandwidth.copy, "read_bytes_per_s": bandwidth.read}
    for batch in (1, BATCH):
        bytes_s = decode_floor_s(
            batch=batch,
            context=args.input_len + args.output_len // 2,
            weight_bytes=info.weight_bytes,
            bytes_per_cell=info.bytes_per_cell,
            bandwidth=bandwidth.best,
        )
        flops = measure_matmul_rate(batch, "cpu")
        products_s = 2 * batch * info.weight_bytes / 4 / flops
        floors[f"batch_{batch}"] = {
            "matmul_flops_per_s": flops,
            "by_bytes_tokens_per_s": batch / bytes_s,
            "by_products_tokens_per_s": batch / products_s,
        }
    return floors


def _share_equal(theirs: Answers, ours: Answers) -> float:
    pairs = [pair for a, b in zip(theirs, ours, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def make_loads(args: argparse.Namespace) -> Loads:
    equal = workload.uniform(BATCH, args.input_len, args.output_len, vocab_size=49_152, seed=args.seed)
    prompts = workload.mixed(BATCH, (SHORTEST, 2 * args.input_len - SHORTEST), vocab_size=49_152, seed=args.seed)
    padded = [Item(item.prompt, args.output_len) for item in prompts]
    return {"single": equal[:1], "equal16": equal, "padded16": padded}


def alone(measure: Callable[[argparse.Namespace, Path, Loads], Turn], *args: Any) -> Turn:
    """Run `measure` in a new process that ends with it."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *args).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument(
        "--repeats", type=int, default=2, help="runs of each side (transformers: twice as many); the median counts"
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    path = resolve(MODEL, report=print)
    loads = make_loads(args)
    before = alone(measure_transformers, args, path, loads)
    engine = alone(measure_engine, args, path, loads)
    http = measure_http(args, loads)
    after = alone(measure_transformers, args, path, loads)
    rates = {f"engine_{name}": values for name, values in engine.rates.items()}
    rates |= {f"http_{name}": values for name, values in http.items()}
    rates |= {f"transformers_{name}": before.rates[name] + after.rates[name] for name in loads}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        f"{side}_{name}": medians[f"{side}_{name}"] / medians[f"transformers_{name}"]
        for side in ("engine", "http")
        for name in loads
    }
    for name, value in medians.items():
        print(f"{name:>22}: {value:8.1f} tokens/s" + (f"  {ratios[name]:5.2f} x" if name in ratios else ""))
    met = {name: min(ratios[f"engine_{name}"], ratios[f"http_{name}"]) >= bar for name, bar in BARS.items()}
    config = vars(args) | {"model": MODEL, "dtype": "float32", "batch": BATCH}
    figures = {
        "rates": rates,
        "floors": engine.floors,
        "equal_tokens": {name: _share_equal(before.answers[name], engine.answers[name]) for name in loads},
        "medians": medians,
        "ratios": ratios,
        "bars": BARS,
        "met": met,
    }
    record("against_transformers", config, figures, keep=not args.trial)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""SmolLM2-135M in float32 on the CPU: `transformers.generate` against Raycomb, one sequence and sixteen.

One run on one machine measures transformers (one sequence, and its best batch of sixteen: prompts of equal length, so
that nothing is padded), Raycomb's engine in process, Raycomb through its whole HTTP stack, and what the machine can
do at best. All sides are greedy, get the same prompts and generate the same number of tokens; a rate is generated
tokens over the whole time, prefill included. Transformers is measured before Ray is started, so that it has the cores
to itself; its repeats and our engine's alternate.

    python -m benchmarks.against_transformers
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.record import record
from benchmarks.served import free_port, served
from cluster import workload
from cluster.bench_offline import GREEDY
from cluster.bench_online import Prompt, Server, run_load
from cluster.checkpoints import resolve
from cluster.offline_engine import OfflineEngine, open_offline
from cluster.sse_client import Target
from cluster.workload import Item
from planner.request import Request, Update
from worker.config import EngineConfig
from worker.executor import ProgramInfo
from worker.roofline import decode_floor_s, measure_bandwidth, measure_matmul_rate

MODEL = "smollm2-135m"
BATCH = 16
BARS = {"single": 2.0, "batch16": 2.0}
Answers = list[list[int]]


class Transformers:
    """The other side: the model as its users load and run it."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)

    def generate(self, items: Sequence[Item]) -> Answers:
        """All prompts, of one length, in one batch."""
        ids = torch.tensor([item.prompt for item in items])
        new = items[0].output_len
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        answers: Answers = out[:, ids.shape[1] :].tolist()
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


def measure_engines(args: argparse.Namespace, path: Path, loads: dict[str, list[Item]]) -> dict[str, Any]:
    """Transformers and our engine in turn, in this process."""
    config = EngineConfig(
        model=str(path), device="cpu", dtype="float32", prefix_caching=False, num_threads=args.threads
    )
    theirs = Transformers(path)
    rates: dict[str, list[float]] = {}
    agree = {}
    with open_offline(config) as engine:
        for name, items in loads.items():
            agree[name] = _share_equal(theirs.generate(items), run_engine(engine, items))  # the warm-up, too
        for _ in range(args.repeats):
            for name, items in loads.items():
                for side, run in (("transformers", theirs.generate), ("engine", partial(run_engine, engine))):
                    rates.setdefault(f"{side}_{name}", []).append(rate(partial(run, items), items))
        floors = measure_floors(engine.info, args)
    return {"rates": rates, "floors": floors, "equal_tokens": agree}


def measure_http(args: argparse.Namespace, loads: dict[str, list[Item]]) -> dict[str, list[float]]:
    """Our whole stack, with one worker that has all threads."""
    words = [
        *("serve", MODEL, "--num-workers", "1", "--num-gateways", "1", "--host", "127.0.0.1", "--device", "cpu"),
        *("--dtype", "float32", "--num-threads", str(args.threads), "--no-prefix-caching"),
    ]
    rates: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as logs,
        served("cluster.cli", words, port=free_port(), log=Path(logs) / "serve.log") as url,
    ):
        for items in loads.values():
            run_http(url, items)
        for _ in range(args.repeats):
            for name, items in loads.items():
                rates.setdefault(f"http_{name}", []).append(rate(partial(run_http, url, items), items))
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each side; the median counts")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of every side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trial", action="store_true", help="write no result file")
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    torch.set_num_threads(args.threads)
    path = resolve(MODEL, report=print)
    items = workload.uniform(BATCH, args.input_len, args.output_len, vocab_size=49_152, seed=args.seed)
    loads = {"single": items[:1], "batch16": items}
    figures = measure_engines(args, path, loads)
    figures["rates"] |= measure_http(args, loads)
    medians = {name: statistics.median(values) for name, values in figures["rates"].items()}
    ratios = {
        f"{side}_{name}": medians[f"{side}_{name}"] / medians[f"transformers_{name}"]
        for side in ("engine", "http")
        for name in loads
    }
    for name, value in medians.items():
        print(f"{name:>22}: {value:8.1f} tokens/s" + (f"  {ratios[name]:5.2f} x" if name in ratios else ""))
    met = {name: min(ratios[f"engine_{name}"], ratios[f"http_{name}"]) >= bar for name, bar in BARS.items()}
    config = vars(args) | {"model": MODEL, "dtype": "float32", "batch": BATCH}
    figures |= {"medians": medians, "ratios": ratios, "bars": BARS, "met": met}
    record("against_transformers", config, figures, keep=not args.trial)
    return 0 if all(met.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""`raycomb bench offline`: how fast one engine in this process decodes and prefills, beside what its memory allows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from cluster import workload
from cluster.offline_engine import OfflineEngine
from cluster.workload import Item, Workload
from planner.errors import RequestFailed
from planner.request import FinishReason, Request, SamplingParams, Update

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What to measure. Lengths are tokens; `repeats` runs are made of each point and the fastest one counts."""

    workload: Workload
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    input_len: int = 128
    output_len: int = 256
    num_prompts: int = 64
    shortest: int = 100
    longest: int = 1024
    seed: int = 0
    repeats: int = 2


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch size. `step_ms`: time of one token of every sequence, prefill taken off. `context`: mean length."""

    batch: int
    step_ms: float
    tokens_per_s: float
    prefill_s: float
    context: int


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One run of a whole load."""

    num_prompts: int
    input_tokens: int
    output_tokens: int
    seconds: float

    @property
    def figures(self) -> dict[str, float]:
        return asdict(self) | {
            "input_tokens_per_s": self.input_tokens / self.seconds,
            "output_tokens_per_s": self.output_tokens / self.seconds,
        }


class Bench:
    """Runs loads on one engine and times them. Answers are greedy and always of full length."""

    def __init__(self, engine: OfflineEngine, vocab_size: int, max_in_flight: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._max_in_flight = max_in_flight

    def warm_up(self) -> None:
        self.seconds(workload.uniform(4, 32, 8, vocab_size=self._vocab_size, seed=1))

    def decode(self, load: Load) -> list[DecodePoint]:
        """(Time for 1 + N tokens) - (time for 1 token), over N, for each batch size."""
        points = []
        for batch in load.batch_sizes:
            one = self._best(self._uniform(load, batch, 1), load.repeats)
            full = self._best(self._uniform(load, batch, 1 + load.output_len), load.repeats)
            step_s = (full - one) / load.output_len
            context = load.input_len + load.output_len // 2
            points.append(DecodePoint(batch, step_s * 1e3, batch / step_s, one, context))
        return points

    def throughput(self, load: Load) -> ThroughputPoint:
        """The mixed or the prefill load, whole."""
        if load.workload is Workload.MIXED:
            lengths = (load.shortest, load.longest)
            items = workload.mixed(load.num_prompts, lengths, vocab_size=self._vocab_size, seed=load.seed)
        else:
            items = self._uniform(load, load.num_prompts, 1)
        seconds = self._best(items, load.repeats)
        return ThroughputPoint(len(items), workload.total_input(items), workload.total_output(items), seconds)

    def seconds(self, items: Sequence[Item]) -> float:
        """From the first submit to the last token. Raises the error of a sequence that was refused or failed."""
        requests = [
            (key, Request(np.asarray(item.prompt, dtype=np.int64), item.output_len, GREEDY))
            for key, item in enumerate(items)
        ]
        start = time.perf_counter()
        num_tokens = 0
        for news in self._engine.run(requests, self._max_in_flight):
            num_tokens += len(_checked(news.update).tokens)
        seconds = time.perf_counter() - start
        if num_tokens != workload.total_output(items):
            raise RequestFailed(f"{num_tokens} tokens came where {workload.total_output(items)} were asked for")
        return seconds

    def _best(self, items: Sequence[Item], repeats: int) -> float:
        return min(self.seconds(items) for _ in range(repeats))

    def _uniform(self, load: Load, num_prompts: int, output_len: int) -> list[Item]:
        return workload.uniform(num_prompts, load.input_len, output_len, vocab_size=self._vocab_size, seed=load.seed)


def _checked(update: Update | Exception) -> Update:
    if isinstance(update, Exception):
        raise update
    if update.finish_reason is FinishReason.FAILED and update.error is not None:
        raise update.error
    return update

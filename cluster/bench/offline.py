"""How fast one engine in this process decodes and prefills. Runs loads and times them; the command is elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.bench import workload
from cluster.bench.workload import Item
from cluster.offline.engine import OfflineEngine
from planner.errors import RequestFailed, RequestRefused
from planner.request import FinishReason, Request, SamplingParams, Update

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch size. `step_ms`: time of one token of every sequence, with the prefill taken off. `context`: the
    mean length of a sequence meanwhile. `prefill_s`: all prompts and one token each."""

    batch: int
    context: int
    step_ms: float
    tokens_per_s: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class ThroughputPoint:
    """One run of a whole load."""

    num_prompts: int
    input_tokens: int
    output_tokens: int
    seconds: float
    input_tokens_per_s: float
    output_tokens_per_s: float


class OfflineBench:
    """Runs loads on one engine and times them. Answers are always of full length, and greedy unless `sampling` says
    otherwise.

    Of `repeats` runs of the same load the fastest one counts, since whatever else disturbs a run only slows it. The
    engine must have no prefix cache, or the second run would find the first one's prompts.
    """

    def __init__(
        self,
        engine: OfflineEngine,
        *,
        max_in_flight: int,
        repeats: int,
        seed: int,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._vocab_size = engine.info.vocab_size
        self._max_in_flight = max_in_flight
        self._repeats = repeats
        self._seed = seed

    def warm_up(self) -> None:
        """Run everything once that is slow the first time."""
        self.seconds(self._uniform(4, 32, 8))

    def decode(self, batch: int, *, input_len: int, output_len: int) -> DecodePoint:
        """(Time for 1 + `output_len` tokens) - (time for 1 token), over `output_len`, of `batch` sequences."""
        one = self._fastest(self._uniform(batch, input_len, 1))
        full = self._fastest(self._uniform(batch, input_len, 1 + output_len))
        step_s = max(full - one, 1e-9) / output_len
        return DecodePoint(batch, input_len + output_len // 2, step_s * 1e3, batch / step_s, one)

    def mixed(self, num_prompts: int, lengths: tuple[int, int]) -> ThroughputPoint:
        """Prompts and answers of random lengths, all sent at once."""
        return self._throughput(workload.mixed(num_prompts, lengths, vocab_size=self._vocab_size, seed=self._seed))

    def prefill(self, num_prompts: int, *, input_len: int) -> ThroughputPoint:
        """Prompts of one length, one token of answer each."""
        return self._throughput(self._uniform(num_prompts, input_len, 1))

    def seconds(self, items: Sequence[Item]) -> float:
        """From the first submit to the last token. Raises the error of a request that was refused or failed."""
        requests = [
            (key, Request(np.asarray(item.prompt, dtype=np.int64), item.output_len, self._sampling))
            for key, item in enumerate(items)
        ]
        start = time.perf_counter()
        num_tokens = sum(_num_tokens(news.update) for news in self._engine.run(requests, self._max_in_flight))
        seconds = time.perf_counter() - start
        if num_tokens != workload.total_output(items):
            raise RequestFailed(f"{num_tokens} tokens came where {workload.total_output(items)} were asked for")
        return seconds

    def _throughput(self, items: Sequence[Item]) -> ThroughputPoint:
        seconds = self._fastest(items)
        num_in, num_out = workload.total_input(items), workload.total_output(items)
        return ThroughputPoint(len(items), num_in, num_out, seconds, num_in / seconds, num_out / seconds)

    def _fastest(self, items: Sequence[Item]) -> float:
        return min(self.seconds(items) for _ in range(self._repeats))

    def _uniform(self, num_prompts: int, input_len: int, output_len: int) -> list[Item]:
        return workload.uniform(num_prompts, input_len, output_len, vocab_size=self._vocab_size, seed=self._seed)


def _num_tokens(update: Update | RequestRefused) -> int:
    if isinstance(update, RequestRefused):
        raise update
    if update.finish_reason is FinishReason.FAILED:
        raise update.error or RequestFailed("a sequence failed without saying why")
    return len(update.tokens)

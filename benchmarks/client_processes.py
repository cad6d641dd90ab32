"""Clients in processes of their own, for loads that one process cannot ask for.

A core reads some 30,000 events a second. All times are of `time.perf_counter`, which processes of a Linux host share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.bench.latency import LoadResult, RequestRecord
from cluster.bench.online import Server, run_load
from cluster.bench.workloads import Prompt

Item = TypeVar("Item")
Result = TypeVar("Result")

START_IN_S = 0.3


@dataclass(frozen=True, slots=True)
class Asked:
    """What the clients of one load saw, put together, and the processor time of all of them."""

    result: LoadResult
    processor_s: float


class ClientProcesses:
    """As many processes as were asked for, started and warm. Owner: whoever made it; not for several threads."""

    def __init__(self, pool: ProcessPoolExecutor, num_processes: int) -> None:
        self._pool = pool
        self.num_processes = num_processes
        self.each(_import_nothing, range(num_processes))

    def each(self, function: Callable[..., Result], items: Sequence[Item], *more: Any) -> list[Result]:
        """`function(share of items, *more)` in each process, with every n-th item. Blocks; raises what it raises."""
        return [future.result() for future in self.start(function, items, *more)]

    def start(self, function: Callable[..., Result], items: Sequence[Item], *more: Any) -> list[Future[Result]]:
        """The same without waiting."""
        shares = [items[place :: self.num_processes] for place in range(self.num_processes)]
        return [self._pool.submit(function, share, *more) for share in shares if share]

    def ask(self, server: Server, prompts: Sequence[Prompt], times: Sequence[float] | None = None) -> Asked:
        """Send all prompts, at once or at their `times` (seconds from the start), and wait for all answers."""
        when = times or [0.0] * len(prompts)
        asked = self.each(_ask, list(zip(prompts, when, strict=True)), server, time.perf_counter() + START_IN_S)
        records = [record for share, _ in asked for record in share]
        duration_s = max(record.ended for record in records) - min(record.sent for record in records)
        return Asked(LoadResult(records, duration_s), sum(used for _, used in asked))


@contextmanager
def client_processes(count: int) -> Iterator[ClientProcesses]:
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield ClientProcesses(pool, count)


def _import_nothing(share: Sequence[int]) -> None:
    """Started is enough: what this module imports is all that clients need."""


def _ask(
    share: Sequence[tuple[Prompt, float]], server: Server, start_at: float
) -> tuple[Sequence[RequestRecord], float]:
    """In a client's process."""
    begun = time.process_time()
    time.sleep(max(0.0, start_at - time.perf_counter()))
    prompts, times = [prompt for prompt, _ in share], [at for _, at in share]
    result = asyncio.run(run_load(server, prompts, times=times))
    return result.records, time.process_time() - begun

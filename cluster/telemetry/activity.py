"""What is alive in a gateway's process: for people and tests that look for leaks. Slow, since it walks the heap."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass

from cluster.answers.answer import Answer
from cluster.routing.generation import RemoteGeneration
from cluster.routing.run import Run


@dataclass(frozen=True, slots=True)
class Activity:
    """`num_requests` were sent to workers and are not over; the others are objects in memory, live or leaked.

    `tasks` counts the event loop's unfinished tasks by the name of their coroutine.
    """

    num_requests: int
    num_generations: int
    num_runs: int
    num_answers: int
    tasks: dict[str, int]


def activity(num_requests: int) -> Activity:
    """Of the process and event loop of the caller."""
    gc.collect()
    kinds = Counter(type(thing) for thing in gc.get_objects())
    names = Counter(getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks())
    return Activity(
        num_requests=num_requests,
        num_generations=kinds[RemoteGeneration],
        num_runs=kinds[Run],
        num_answers=kinds[Answer],
        tasks=dict(names),
    )

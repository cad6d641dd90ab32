"""Which worker takes a request: a pure function of the request's need and of what is known of the workers.

The model of time is deliberately coarse, in tokens: a worker's steps carry one token of each running sequence beside
the prefill, so a request's first token comes after the prefill tokens queued before it, its own prompt, and the
decodes that share those steps. Not for following workers over time: `cluster.router` owns that.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planner.errors import QueueFull, Unavailable

MAX_RETRY_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a worker before its first token can come."""

    prompt_tokens: int
    num_sequences: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker as one gateway knows it: its last snapshot, with what was sent since added to it.

    `free_cells` counts cells that no running sequence owns (free or cached). `max_prefill_tokens` is W.
    """

    worker_id: str
    accepts: bool
    free_cells: int
    num_running: int
    num_waiting: int
    queued_prefill_tokens: int
    max_num_seqs: int
    max_waiting: int
    max_prefill_tokens: int


def assign(need: Need, candidates: Iterable[Candidate]) -> str | Unavailable | QueueFull:
    """The id of the worker whose first token is expected first, or the reason why no worker can take the request.

    Among equals the first candidate wins, so the caller's order decides ties and equal inputs give equal answers.
    """
    accepting = [candidate for candidate in candidates if candidate.accepts]
    if not accepting:
        return Unavailable("no worker takes requests now: all are starting, draining or gone")
    with_room = [candidate for candidate in accepting if candidate.num_waiting < candidate.max_waiting]
    if not with_room:
        return QueueFull(
            f"the queues of all {len(accepting)} workers are full", retry_after_s=min(map(_retry_after_s, accepting))
        )
    return min(with_room, key=lambda candidate: _expected_wait(need, candidate)).worker_id


def _expected_wait(need: Need, candidate: Candidate) -> tuple[int, int]:
    """Generations of running sequences that must end first, and then the tokens before the first token."""
    over = candidate.num_running + candidate.num_waiting + need.num_sequences - candidate.max_num_seqs
    generations = max(0, -(-over // candidate.max_num_seqs))
    if need.prompt_tokens > candidate.free_cells:
        generations = max(1, generations)
    prefill = candidate.queued_prefill_tokens + need.prompt_tokens
    steps = -(-prefill // candidate.max_prefill_tokens)
    return generations, prefill + steps * candidate.num_running


def _retry_after_s(candidate: Candidate) -> float:
    """A second for each generation of running sequences that must end before the queue has moved up once."""
    return min(MAX_RETRY_AFTER_S, 1.0 + candidate.num_waiting / candidate.max_num_seqs)

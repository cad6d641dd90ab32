"""Which worker takes a request: a pure function of the request's need and of what is known of the workers.

The model of time is deliberately coarse, in tokens: a worker's steps carry one token of each running sequence beside
the prefill, so a request's first token comes after the prefill tokens queued before it, what of its own prompt is not
resident there, and the decodes that share those steps. Not for following workers over time: `cluster.routing.router`
owns that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.errors import QueueFull, Unavailable
from worker.queue_rate import retry_after_s

HOT_RATIO = 1.25
HOT_SEQUENCES = 8
HOT_STEPS = 4
"""A worker is hot with more than so many times the mean of sequences and so many beyond that, or with more queued
prefill than that ratio and so many full steps: what it has cached draws no more requests to it. It still takes those
for which it is the best anyway, and the others keep what they attract."""

RECOMPUTED_WEIGHT = 6
"""A prompt's token that is not resident counts so often: it keeps waiting its own request and those behind it, and
another copy of a prefix takes the cells of other prefixes. Counted once, a burst of one prefix would scatter, since a
second copy is as soon computed as the first is waited for. Measured: `benchmarks/placement.py`, `docs/decisions.md`."""

ANSWER_WEIGHT = 2
"""A token that is still to be drawn counts so often: about what it costs of a full step beside one of a prompt. It does
not delay a first token, but work is to be even, and what is left to draw tells more of that than how many run. A worker
with more of it than the others counts for at most one full step more: no first token waits longer for the sake of even
work. Measured: `benchmarks/even_work.py`, `docs/decisions.md`."""

_GENERATION = 2**40
"""More than any number of tokens: generations of running sequences are compared first."""

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of a worker before its first token can come. `blocks` are the names of its prompt's blocks,
    as in `planner.blocks`. `owner` is the row of the worker that holds what the request goes on with, such as a
    session's cells, if there is one."""

    prompt_tokens: int
    num_sequences: int
    blocks: tuple[int, ...] = ()
    owner: int | None = None


class Candidate(NamedTuple):
    """A worker as one gateway knows it: its last snapshot, with what was sent since added to it.

    `free_cells` counts cells that no running sequence owns (free or cached). `num_seats_wanted` counts sequences that
    run or wait to, `num_waiting` requests that wait. `answer_tokens` are expected still to be drawn, for those that run
    and those that wait. `max_prefill_tokens` is W.
    `queue_tokens_per_s` is how fast the queued tokens are done; 0 where it is not known.
    """

    accepts: bool
    free_cells: int
    num_running: int
    num_seats_wanted: int
    num_waiting: int
    queued_prefill_tokens: int
    answer_tokens: int
    max_num_seqs: int
    max_waiting: int
    max_waiting_tokens: int
    max_prefill_tokens: int
    queue_tokens_per_s: int


class Candidates:
    """Candidates by row, kept as columns so that a thousand are judged at once. Whoever sets rows knows which."""

    def __init__(self) -> None:
        self._table = np.zeros((len(Candidate._fields), 0), np.int64)

    def __len__(self) -> int:
        """Rows that there is room for, set or not."""
        return self._table.shape[1]

    def __setitem__(self, row: int, candidate: Candidate) -> None:
        if row >= len(self):
            grown = np.zeros((len(Candidate._fields), max(8, 2 * row)), np.int64)
            grown[:, : len(self)] = self._table
            self._table = grown
        self._table[:, row] = candidate

    def column(self, name: str) -> Int64Array:
        """int64[rows], a view."""
        column: Int64Array = self._table[Candidate._fields.index(name)]
        return column


def able(candidates: Candidates, rows: Int64Array) -> Int64Array | Unavailable | QueueFull:
    """Those of int64[n] `rows` whose workers can take a request, in their order; or the reason why none can."""
    accepting = rows[candidates.column("accepts")[rows] > 0]
    if not len(accepting):
        return Unavailable("no worker takes requests now: all are starting, draining or gone")
    num_waiting = candidates.column("num_waiting")[accepting]
    num_tokens = candidates.column("queued_prefill_tokens")[accepting]
    has_room = num_waiting < candidates.column("max_waiting")[accepting]
    has_room &= num_tokens < candidates.column("max_waiting_tokens")[accepting]
    if not has_room.any():
        rates = candidates.column("queue_tokens_per_s")[accepting]
        queues = zip(num_tokens.tolist(), rates.tolist(), strict=True)
        waits_s = [retry_after_s(num_queued, rate or None) for num_queued, rate in queues]
        return QueueFull(f"every worker's queue is full (workers: {len(accepting)})", retry_after_s=min(waits_s))
    return accepting[has_room]


def assign(need: Need, candidates: Candidates, rows: Int64Array, cached_tokens: Int64Array, turn: int = 0) -> int:
    """The row, one of the `able` rows, of the worker whose first token is expected first; the owner's if it is able.

    `cached_tokens` int64[rows of candidates]: of the prompt, what is resident at each worker, or will be by the time
    it runs there. Among equals `turn`, modulo their number, counts along `rows`: equal inputs give equal answers, and
    who varies it spreads.
    """
    if need.owner is not None and (rows == need.owner).any():
        return need.owner
    waits = _expected_waits(need, candidates, rows, cached_tokens[rows])
    best = rows[waits == waits.min()]
    return int(best[turn % len(best)])


class Surplus(NamedTuple):
    """Of a worker without room for what waits there: requests that wait, and how many of them would find room
    elsewhere."""

    num_waiting: int
    num_elsewhere: int


def surplus(candidates: Candidates, rows: Int64Array) -> dict[int, Surplus]:
    """By row, those of int64[n] `rows` where requests wait for seats or cells while other workers that take requests
    have both. What there is elsewhere goes to those with the most to give."""
    column = {name: candidates.column(name)[rows] for name in Candidate._fields}
    waiting, queued = column["num_waiting"], column["queued_prefill_tokens"]
    seats = column["max_num_seqs"] - column["num_seats_wanted"]
    lacks_room = (waiting > 0) & ((seats < 0) | (queued > column["free_cells"]))
    has_room = (column["accepts"] > 0) & (queued < column["free_cells"])
    num_free = int(seats[has_room].clip(min=0).sum())
    found: dict[int, Surplus] = {}
    for place in sorted(np.flatnonzero(lacks_room).tolist(), key=lambda place: -int(waiting[place])):
        taken = min(num_free, int(waiting[place]))
        num_free -= taken
        if taken:
            found[int(rows[place])] = Surplus(int(waiting[place]), taken)
    return found


def _expected_waits(need: Need, candidates: Candidates, rows: Int64Array, cached_tokens: Int64Array) -> Int64Array:
    """Generations of running sequences that must end first, and below them the tokens before the first token."""
    column = {name: candidates.column(name)[rows] for name in Candidate._fields}
    seats, queued, width = column["max_num_seqs"], column["queued_prefill_tokens"], column["max_prefill_tokens"]
    over = column["num_seats_wanted"] + need.num_sequences - seats
    # What is resident takes no new cells where a running sequence owns it, and that is where pools are full.
    misses_cells = need.prompt_tokens - cached_tokens > column["free_cells"]
    generations = np.maximum(-(-over // seats), misses_cells).clip(min=0)
    hot = _far_above_mean(column["num_seats_wanted"], HOT_SEQUENCES) | _far_above_mean(queued, HOT_STEPS * width)
    # A prompt's last token is always computed, since its logits are wanted.
    uncached = np.maximum(1, need.prompt_tokens - np.where(hot, 0, cached_tokens))
    decodes = -(-(queued + uncached) // width) * column["num_running"]
    waits: Int64Array = generations * _GENERATION + queued + RECOMPUTED_WEIGHT * uncached + decodes
    answers = column["answer_tokens"]
    waits += (ANSWER_WEIGHT * (answers - answers.min())).clip(max=width)
    return waits


def _far_above_mean(load: Int64Array, slack: int | Int64Array) -> npt.NDArray[np.bool_]:
    far: npt.NDArray[np.bool_] = load > HOT_RATIO * load.mean() + slack
    return far

"""What a worker's pool and queue hold at one moment, sequence by sequence: for people, at a cost of O(capacity)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

import numpy as np

from planner.cells import CellTable
from planner.sequence import Family, Sequence

MAX_BINS: Final = 1024
"""Of a pool's map; a bin stands for as many neighbouring cells."""

MAX_SEQUENCES: Final = 1024
"""Told one by one."""


class Phase(Enum):
    """What a sequence does. UNFORKED: it waits for its request's first one to compute the prompt."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    UNFORKED = "unforked"


@dataclass(frozen=True, slots=True)
class SequenceAccount:
    """`sequence` names its list of cells while it runs, None while it has none. `num_computed` of its `num_tokens` are
    in cells; `num_cells` counts those that it shares with others too."""

    request: int
    index: int
    phase: Phase
    tenant: str
    sequence: int | None
    num_prompt: int
    num_tokens: int
    num_computed: int
    num_cells: int


@dataclass(frozen=True, slots=True)
class Span:
    """So many neighbouring bins of a map look alike. `owner`: "free", "cached", or a sequence's number in text."""

    owner: str
    num_bins: int


@dataclass(frozen=True, slots=True)
class PoolAccount:
    """free + owned + cached = capacity. `referenced` counts owned cells once for each sequence that has them, so
    `referenced - owned` is what sharing saves. `adds_up`: the counters agree with the sequences' lists, recounted."""

    capacity: int
    free: int
    owned: int
    cached: int
    referenced: int
    adds_up: bool
    cells_per_bin: int
    map: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """`sequences` are the first of `num_sequences`, by arrival."""

    pool: PoolAccount
    num_sequences: int
    sequences: tuple[SequenceAccount, ...]


def inspect(families: Iterable[Family], table: CellTable) -> Inspection:
    """Of the planner's own things; reads them only."""
    accounts = [account for family in families for account in _accounts(family, table)]
    return Inspection(_pool(table), len(accounts), tuple(accounts[:MAX_SEQUENCES]))


def _accounts(family: Family, table: CellTable) -> list[SequenceAccount]:
    live = [_account(family, sequence, table) for _, sequence in sorted(family.live.items())]
    num_prompt = len(family.request.prompt)
    unforked = [
        SequenceAccount(
            family.request_id, index, Phase.UNFORKED, family.request.tenant, None, num_prompt, num_prompt, 0, 0
        )
        for index in sorted(family.unforked)
    ]
    return live + unforked


def _account(family: Family, sequence: Sequence, table: CellTable) -> SequenceAccount:
    if sequence.cells_id is None:
        phase, num_cells = Phase.WAITING, 0
    else:
        phase = Phase.PREFILLING if sequence.num_planned < sequence.num_prompt else Phase.DECODING
        num_cells = table.position(sequence.cells_id)
    return SequenceAccount(
        request=family.request_id,
        index=sequence.index,
        phase=phase,
        tenant=family.request.tenant,
        sequence=sequence.cells_id,
        num_prompt=sequence.num_prompt,
        num_tokens=len(sequence.tokens),
        num_computed=sequence.num_computed,
        num_cells=num_cells,
    )


def _pool(table: CellTable) -> PoolAccount:
    lists = table.lists()
    owned = np.unique(np.concatenate([np.empty(0, np.int32), *lists.values()]))
    per_bin = max(1, -(-table.capacity // MAX_BINS))
    shown = table.unfree().astype(np.int64)  # 0: free, 1: cached, from 2 on: a sequence
    for sequence, cells in lists.items():
        shown[cells] = sequence + 1
    bins = np.maximum.reduceat(shown, np.arange(0, table.capacity, per_bin))
    return PoolAccount(
        capacity=table.capacity,
        free=table.free,
        owned=table.owned,
        cached=table.cached,
        referenced=sum(map(len, lists.values())),
        adds_up=len(owned) == table.owned and int(np.count_nonzero(shown)) == table.capacity - table.free,
        cells_per_bin=per_bin,
        map=tuple(_spans(bins.tolist())),
    )


def _spans(bins: list[int]) -> list[Span]:
    spans: list[Span] = []
    begin = 0
    for at in range(1, len(bins) + 1):
        if at == len(bins) or bins[at] != bins[begin]:
            owner = ("free", "cached")[bins[begin]] if bins[begin] < 2 else str(bins[begin] - 1)
            spans.append(Span(owner, at - begin))
            begin = at
    return spans

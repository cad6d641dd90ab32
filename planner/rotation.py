"""Who prefills, and in what order they take turns: fairly among tenants, and within one the longest unserved first."""

from __future__ import annotations

from collections.abc import KeysView, Mapping

from planner.request import Request
from planner.sequence import Sequence
from planner.shares import Shares


class Rotation:
    """Owner: the schedule. A class of priority keeps account of its tenants for as long as one of it prefills."""

    def __init__(self, chunk_tokens: int, weights: Mapping[str, float]) -> None:
        """`chunk_tokens` is the longest turn; `weights` are tenants' shares, 1 for those that have none."""
        self._chunk_tokens = chunk_tokens
        self._weights = weights
        self._sequences: dict[Sequence, None] = {}  # who was served longest ago comes first
        self._shares: dict[int, Shares] = {}

    @property
    def sequences(self) -> KeysView[Sequence]:
        """Those that prefill; the view follows them."""
        return self._sequences.keys()

    @property
    def num_tokens(self) -> int:
        """Tokens that no step has fed yet."""
        return sum(sequence.num_to_feed for sequence in self._sequences)

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence] = None
        self._shares.setdefault(sequence.family.request.priority, Shares(self._weights))

    def discard(self, sequence: Sequence) -> None:
        if sequence in self._sequences:
            del self._sequences[sequence]
            priority = sequence.family.request.priority
            if all(other.family.request.priority != priority for other in self._sequences):
                del self._shares[priority]

    def tokens_before(self, request: Request) -> int:
        """Tokens of the request's own tenant that have their turns before its first one."""
        alike = (sequence for sequence in self._sequences if _account(sequence.family.request) == _account(request))
        return sum(min(self._chunk_tokens, sequence.num_to_feed) for sequence in alike)

    def turns(self) -> list[Sequence]:
        """One pass: each sequence once, by priority, and then as its tenant's turns before it allow."""
        ends: dict[tuple[int, str], float] = {}
        keys: dict[Sequence, tuple[int, float]] = {}
        for sequence in self._sequences:
            request = sequence.family.request
            shares, account = self._shares[request.priority], _account(request)
            start = ends.get(account, shares.start(request.tenant))
            keys[sequence] = request.priority, start
            ends[account] = start + min(self._chunk_tokens, sequence.num_to_feed) / shares.weight(request.tenant)
        if len(ends) == 1:
            return list(keys)
        return sorted(keys, key=keys.__getitem__)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """It has had tokens: it goes to the back, or leaves when none are left."""
        request = sequence.family.request
        self._shares[request.priority].serve(request.tenant, num_tokens)
        if sequence.num_to_feed > 0:
            del self._sequences[sequence]
            self._sequences[sequence] = None
        else:
            self.discard(sequence)


def _account(request: Request) -> tuple[int, str]:
    return request.priority, request.tenant

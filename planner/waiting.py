"""The queue of sequences that wait for cells, whether new or preempted.

By class (priority, and what began elsewhere before what is new), then fairly by tenant, then by arrival.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping

from planner.request import Request
from planner.sequence import Account, ClassKey, Sequence, account_of
from planner.shares import Shares


class _Line:
    """Sequences of one tenant in one class, ordered by `Sequence.order`."""

    def __init__(self) -> None:
        self.sequences: list[Sequence] = []
        self.num_tokens = 0

    def place(self, sequence: Sequence) -> int:
        return bisect.bisect_left(self.sequences, sequence.order, key=lambda waiting: waiting.order)


class _Class:
    """The lines of one class, none of them empty, and what their tenants have had of late."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.lines: dict[str, _Line] = {}
        self.shares = Shares(weights)

    @property
    def head(self) -> Sequence:
        """The first one of the tenant whose turn it is. O(tenants that wait)."""
        if len(self.lines) == 1:
            return next(iter(self.lines.values())).sequences[0]
        heads = ((self.shares.start(tenant), line.sequences[0].order) for tenant, line in self.lines.items())
        return min(zip(heads, self.lines.values(), strict=True), key=lambda pair: pair[0])[1].sequences[0]

    def tokens_before(self, tenant: str) -> int:
        """Tokens of this class that go before what the tenant would add now."""
        own = self.lines.get(tenant)
        num_own = 0 if own is None else own.num_tokens
        turn = self.shares.start(tenant) + num_own / self.shares.weight(tenant)
        for other, line in self.lines.items():
            if line is not own:
                served = max(0.0, turn - self.shares.start(other)) * self.shares.weight(other)
                num_own += min(line.num_tokens, int(served))
        return num_own


class WaitingQueue:
    """Bounded by its owner, who refuses requests while it is full.

    A class keeps account of its tenants for as long as somebody waits in it: with nobody waiting, what one tenant gets
    is no loss of another.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights` are tenants' shares; 1 for those that have none."""
        self._weights = weights
        self._classes: dict[ClassKey, _Class] = {}
        self._counted: dict[Sequence, int] = {}  # who waits, and the tokens to prefill of each as it came
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._counted)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._counted

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, in no order."""
        return iter(self._counted)

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill of all that wait, cached prefixes not considered."""
        return self._num_tokens

    @property
    def head(self) -> Sequence:
        """Who is next, where somebody waits."""
        return self._classes[min(self._classes)].head

    def tokens_before(self, request: Request) -> int:
        """Waiting tokens that go before those of a request that came now, as far as known."""
        key, tenant = account_of(request)
        before = sum(line.num_tokens for k, c in self._classes.items() if k < key for line in c.lines.values())
        return before + (self._classes[key].tokens_before(tenant) if key in self._classes else 0)

    def add(self, sequence: Sequence) -> None:
        class_key, tenant = sequence.family.account
        fair = self._classes.setdefault(class_key, _Class(self._weights))
        line = fair.lines.setdefault(tenant, _Line())
        line.sequences.insert(line.place(sequence), sequence)
        num_tokens = self._counted[sequence] = sequence.num_to_prefill
        line.num_tokens += num_tokens
        self._num_tokens += num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        assert sequence in self
        class_key, tenant = sequence.family.account
        fair = self._classes[class_key]
        line = fair.lines[tenant]
        del line.sequences[line.place(sequence)]
        num_tokens = self._counted.pop(sequence)
        line.num_tokens -= num_tokens
        self._num_tokens -= num_tokens
        if not line.sequences:
            del fair.lines[tenant]
        if not fair.lines:
            del self._classes[class_key]

    def admit(self, sequence: Sequence) -> None:
        """Take out the head, whose tenant is charged the tokens that are left to prefill."""
        class_key, tenant = sequence.family.account
        self._classes[class_key].shares.serve(tenant, sequence.num_to_feed)
        self.remove(sequence)

    def charge(self, account: Account, num_tokens: int) -> None:
        """Sequences that were admitted got more tokens; free of charge while nobody waits in their class."""
        fair = self._classes.get(account.class_key)
        if fair is not None:
            fair.shares.charge(account.tenant, num_tokens)

"""Whose turn it is among tenants that want the same thing: start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996).

Knows tokens and weights, and neither sequences nor cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

MAX_ACCOUNTS: Final = 4096
"""Tenants remembered at once; their names are the clients' to choose."""


class Shares:
    """The accounts of one class of requests. A tenant's tokens, divided by its weight, are the virtual time it used.

    Whoever has the lowest `start` goes first. A tenant that used nothing for a while starts at the virtual time of
    the one served last: it has saved nothing up, and owes nothing. While two tenants want tokens all the time, what
    they got per weight differs by no more than the largest single charge of each, per weight.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """A tenant that `weights` does not name weighs 1."""
        self._weights = weights
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def start(self, tenant: str) -> float:
        """Virtual time at which the tenant's next tokens begin."""
        return max(self._now, self._ends.get(tenant, 0.0))

    def charge(self, tenant: str, num_tokens: int) -> None:
        """The tenant got tokens out of turn, such as those that follow from an earlier turn."""
        self._ends[tenant] = self.start(tenant) + num_tokens / self.weight(tenant)
        if len(self._ends) > MAX_ACCOUNTS:
            self._forget_half()

    def serve(self, tenant: str, num_tokens: int) -> None:
        """It was the tenant's turn, and it got tokens."""
        self._now = self.start(tenant)
        self.charge(tenant, num_tokens)

    def _forget_half(self) -> None:
        """Close the accounts that used the least: virtual time moves on to where the others stand."""
        self._now = max(self._now, sorted(self._ends.values())[len(self._ends) // 2])
        self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._now}

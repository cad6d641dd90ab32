"""How many tokens the answers that a planner has accepted are still expected to take.

For placing requests, where work is to be even between workers; nothing in a plan depends on it. An answer that no token
can stop takes its whole budget. Of the others it is known how many tokens they drew and how many of them ended before
their budget: each further token is taken to end an answer with that probability (a geometric length, fitted by maximum
likelihood to answers of which the budget cuts some short), so what is left of an answer does not depend on its past.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from planner.request import Request

FORGETTING_TOKENS: Final = 65_536
"""Once so many tokens were drawn all counts are halved: some hundred answers of a chat are remembered."""


class Outlook:
    """Owner: the planner, which tells it of every accepted request, every token and every end. All O(1)."""

    def __init__(self) -> None:
        self._num_drawn = 0
        self._num_early_ends = 0
        self._num_sure = 0
        """Tokens that answers without a stop have left."""
        self._num_free = 0
        self._num_free_budget = 0
        """Answers that may end early, and the tokens that they have left at most."""

    @property
    def ends_per_token(self) -> float:
        """The share of tokens that ended an answer before its budget, in [0, 1]; 0 before any did."""
        return self._num_early_ends / self._num_drawn if self._num_drawn else 0.0

    @property
    def num_tokens(self) -> int:
        """Expected of all answers that live. The free ones are taken to have equal budgets left."""
        budget = self._num_free_budget / max(1, self._num_free)
        return self._num_sure + round(self._num_free * _expected(budget, self.ends_per_token))

    def accept(self, request: Request) -> None:
        self._count(request, request.n, request.n * request.max_tokens)

    def draw(self, request: Request) -> None:
        """One of its answers has one more token."""
        if request.stop_token_ids:
            self._num_free_budget -= 1
            self._num_drawn += 1
        else:
            self._num_sure -= 1

    def end(self, request: Request, num_left: int, *, failed: bool) -> None:
        """One of its answers ended with `num_left` tokens of its budget left. A client that has heard enough of it (a
        stop string is the gateway's) ends it as a stop token does."""
        self._count(request, -1, -num_left)
        if 0 < num_left < request.max_tokens and request.stop_token_ids and not failed:
            self._num_early_ends += 1
        if self._num_drawn >= FORGETTING_TOKENS:
            self._num_drawn //= 2
            self._num_early_ends //= 2

    def check(self, left: Iterable[tuple[Request, int]]) -> None:
        """That `left`, each live answer's request and the tokens of its budget that are left, is what was counted."""
        answers = list(left)
        free = [num_left for request, num_left in answers if request.stop_token_ids]
        assert (self._num_free, self._num_free_budget) == (len(free), sum(free)), "answers that may end early"
        assert self._num_sure == sum(num_left for _, num_left in answers) - sum(free), "answers without a stop"

    def _count(self, request: Request, num_answers: int, num_tokens: int) -> None:
        if request.stop_token_ids:
            self._num_free += num_answers
            self._num_free_budget += num_tokens
        else:
            self._num_sure += num_tokens


def expected_answer_tokens(request: Request, ends_per_token: float) -> int:
    """Of all its answers together, before any has begun."""
    if not request.stop_token_ids:
        return request.n * request.max_tokens
    free = _expected(request.max_tokens - request.min_tokens, ends_per_token)
    return request.n * (request.min_tokens + round(free))


def _expected(budget: float, ends_per_token: float) -> float:
    """The mean of a geometric length that is cut at `budget`."""
    if ends_per_token <= 0:
        return budget
    return -math.expm1(budget * math.log1p(-min(ends_per_token, 0.999_999))) / ends_per_token

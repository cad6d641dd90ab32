"""How many tokens are expected of the answers that a planner has accepted."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.outlook import FORGETTING_TOKENS, Outlook, expected_answer_tokens
from planner.request import Request

STOPS = frozenset({7})


def request(max_tokens: int, *, n: int = 1, min_tokens: int = 0, stops: frozenset[int] = frozenset()) -> Request:
    return Request(np.arange(3), max_tokens=max_tokens, n=n, min_tokens=min_tokens, stop_token_ids=stops)


def told(lengths: list[int], budget: int) -> Outlook:
    """After answers of these lengths."""
    outlook = Outlook()
    asked = request(budget, stops=STOPS)
    for length in lengths:
        outlook.accept(asked)
        for _ in range(length):
            outlook.draw(asked)
        outlook.end(asked, budget - length, failed=False)
    return outlook


def test_answers_that_nothing_stops_take_their_budget() -> None:
    outlook = told([10] * 50, budget=100)
    asked = request(30, n=2)
    outlook.accept(asked)
    assert outlook.num_tokens == 60 == expected_answer_tokens(asked, outlook.ends_per_token)
    for _ in range(12):
        outlook.draw(asked)
    outlook.end(asked, 25, failed=False)
    assert outlook.num_tokens == 23


def test_before_any_has_ended_an_answer_is_expected_to_take_its_budget() -> None:
    asked = request(30, stops=STOPS)
    outlook = Outlook()
    outlook.accept(asked)
    assert outlook.num_tokens == expected_answer_tokens(asked, 0.0) == 30


@pytest.mark.parametrize("budget", [5, 40, 4000])
def test_the_mean_of_answers_is_learned_also_where_budgets_cut_them(budget: int) -> None:
    """Answers end with each token by a chance of one in 40."""
    chance = random.Random(1)
    lengths = [min(budget, 1 + int(chance.expovariate(1 / 39.5))) for _ in range(3000)]
    outlook = told(lengths, budget)
    mean = sum(lengths) / len(lengths)
    asked = request(budget, stops=STOPS)
    assert expected_answer_tokens(asked, outlook.ends_per_token) == pytest.approx(mean, rel=0.1)
    for _ in range(10):
        outlook.accept(asked)
    assert outlook.num_tokens == pytest.approx(10 * mean, rel=0.1)


def test_what_is_left_of_an_answer_does_not_depend_on_how_long_it_is() -> None:
    outlook = told([20] * 100, budget=10_000)
    asked = request(10_000, stops=STOPS)
    outlook.accept(asked)
    fresh = outlook.num_tokens
    for _ in range(100):
        outlook.draw(asked)
    assert outlook.num_tokens == pytest.approx(fresh, rel=0.1)


def test_tokens_that_an_answer_must_have_come_on_top() -> None:
    asked = request(500, min_tokens=100, stops=STOPS)
    assert expected_answer_tokens(asked, 0.05) == 120


def test_failures_and_what_never_began_say_nothing_of_lengths() -> None:
    outlook = Outlook()
    asked = request(50, stops=STOPS)
    for num_drawn, failed in ((10, True), (0, False)):
        outlook.accept(asked)
        for _ in range(num_drawn):
            outlook.draw(asked)
        outlook.end(asked, 50 - num_drawn, failed=failed)
    assert outlook.ends_per_token == 0
    assert outlook.num_tokens == 0


def test_old_answers_are_forgotten() -> None:
    outlook = told([10] * (FORGETTING_TOKENS // 20), budget=100)
    long = request(1000, stops=STOPS)
    for _ in range(200):
        outlook.accept(long)
        for _ in range(1000):
            outlook.draw(long)
        outlook.end(long, 0, failed=False)
    assert outlook.ends_per_token < 0.02

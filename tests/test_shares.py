"""Start-time fair queueing by itself, and in the queue of a planner that runs one sequence at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from planner.errors import InvalidConfiguration
from planner.planner import Planner
from planner.shares import MAX_ACCOUNTS, Shares
from planner.step import ChunkOutput, StepResult
from tests.fakes import fake_info, fake_limits, fake_request

WEIGHTS = {"a": 3.0, "b": 0.5}
weights = st.sampled_from([0.25, 1.0, 2.0, 3.0])
sizes = st.integers(1, 40)


@given(st.lists(sizes, min_size=50, max_size=50), st.lists(sizes, min_size=50, max_size=50), weights, weights)
def test_backlogged_tenants_get_what_their_weights_say(
    of_a: list[int], of_b: list[int], weight_a: float, weight_b: float
) -> None:
    shares = Shares({"a": weight_a, "b": weight_b})
    left, had = {"a": iter(of_a), "b": iter(of_b)}, Counter[str]()
    bound = max(of_a) / weight_a + max(of_b) / weight_b
    for _ in range(50):
        tenant = min(("a", "b"), key=shares.start)
        size = next(left[tenant])
        shares.serve(tenant, size)
        had[tenant] += size
        assert abs(had["a"] / weight_a - had["b"] / weight_b) <= bound


def test_a_tenant_that_was_away_has_saved_nothing_up_and_owes_nothing() -> None:
    shares = Shares({})
    for _ in range(100):
        shares.serve("a", 10)
    assert shares.start("new") == 990.0
    assert shares.start("a") == 1000.0
    shares.serve("new", 5)
    assert shares.start("new") == 995.0


def test_what_comes_out_of_turn_counts_all_the_same() -> None:
    shares = Shares({"a": 2.0})
    shares.serve("a", 10)
    shares.charge("a", 30)
    assert shares.start("a") == 20.0
    assert shares.start("b") == 0.0


def test_names_that_clients_make_up_cannot_fill_the_memory() -> None:
    shares = Shares({})
    shares.serve("greedy", 10**6)
    for number in range(3 * MAX_ACCOUNTS):
        shares.serve(f"t{number}", 1)
    assert len(shares._ends) <= MAX_ACCOUNTS
    assert shares.start("greedy") == 10**6


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_a_number_above_zero(weight: float) -> None:
    with pytest.raises(InvalidConfiguration, match="tenant 'a'"):
        fake_limits(fake_info(), tenant_weights={"a": weight})


def run_alone(planner: Planner, sizes_by_id: dict[int, tuple[str, int]]) -> list[tuple[str, int]]:
    """Run to the end; tenants in the order in which their requests ended, each with its tokens."""
    order = []
    while (step := planner.plan()) is not None:
        outcome = [ChunkOutput(1 if chunk.samples else None) for chunk in step.chunks]
        order += [sizes_by_id[u.request_id] for u in planner.commit(step, StepResult(outcome)) if u.finish_reason]
    return order


def alone(**limits: Any) -> Planner:
    return Planner(fake_limits(fake_info(), max_num_seqs=1, max_batched_tokens=16, prefix_caching=False, **limits))


answers = st.lists(st.tuples(sizes, sizes), min_size=12, max_size=12)


@given(answers, answers, weights, weights)
@example([(1, 40)] * 12, [(40, 1)] * 12, 1.0, 1.0)
def test_served_tokens_stay_within_one_request_of_the_weights(
    of_a: Sequence[tuple[int, int]], of_b: Sequence[tuple[int, int]], weight_a: float, weight_b: float
) -> None:
    """Prompts and answers together, for as long as both tenants have requests that wait."""
    planner = alone(tenant_weights={"a": weight_a, "b": weight_b})
    by_id, left = {}, {"a": len(of_a), "b": len(of_b)}
    for tenant, wanted in (("a", of_a), ("b", of_b)):
        for num_prompt, max_tokens in wanted:
            request = fake_request(range(1, num_prompt + 1), max_tokens, tenant=tenant)
            by_id[planner.submit(request)] = tenant, num_prompt + max_tokens - 1
    had = Counter[str]()
    bound = max(map(sum, of_a)) / weight_a + max(map(sum, of_b)) / weight_b
    for tenant, num_tokens in run_alone(planner, by_id):
        had[tenant] += num_tokens
        left[tenant] -= 1
        if not all(left.values()):
            break
        assert abs(had["a"] / weight_a - had["b"] / weight_b) <= bound

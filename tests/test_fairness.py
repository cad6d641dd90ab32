"""Tenants of one planner: nobody's flood is another one's wait, and within a tenant nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import QueueFull
from planner.planner import Planner
from planner.step import ChunkOutput, Step, StepResult
from tests.fakes import fake_info, fake_limits, fake_request


def planner(**limits: Any) -> Planner:
    return Planner(fake_limits(fake_info(), **({"prefix_caching": False} | limits)))


def submit(planner: Planner, tenant: str, num: int = 1, num_prompt: int = 20, **fields: Any) -> list[int]:
    prompt = range(1, num_prompt + 1)
    return [planner.submit(fake_request(prompt, 4, tenant=tenant, **fields)) for _ in range(num)]


def settle(planner: Planner, step: Step) -> list[int]:
    """Requests whose first token came, or any later one."""
    outcome = [ChunkOutput(1 if chunk.samples else None) for chunk in step.chunks]
    return [update.request_id for update in planner.commit(step, StepResult(outcome)) if update.tokens]


def first_tokens(planner: Planner) -> list[int]:
    """Request ids in the order of their first tokens, run to the end."""
    order: dict[int, None] = {}
    while (step := planner.plan()) is not None:
        order |= dict.fromkeys(settle(planner, step))
    return list(order)


def test_a_flood_of_one_tenant_does_not_delay_another_ones_request() -> None:
    busy = planner(max_num_seqs=2)
    submit(busy, "flood", 50)
    (step,) = [busy.plan()]
    assert step is not None
    settle(busy, step)
    (late,) = submit(busy, "other")
    assert first_tokens(busy).index(late) <= 2


def test_of_one_tenant_alone_the_first_to_come_is_the_first_served() -> None:
    busy = planner(max_num_seqs=1)
    ids = submit(busy, "only", 10)
    assert first_tokens(busy) == ids


def test_two_floods_take_turns_by_their_weights() -> None:
    busy = planner(max_num_seqs=1, max_batched_tokens=32, tenant_weights={"a": 3.0})
    of_a, of_b = submit(busy, "a", 30), submit(busy, "b", 30)
    order = first_tokens(busy)
    assert [i for i in order if i in of_a] == of_a
    assert [i for i in order if i in of_b] == of_b
    assert sum(i in of_a for i in order[:24]) == 18


def test_priority_comes_before_fairness() -> None:
    busy = planner(max_num_seqs=1)
    submit(busy, "calm", 3)
    urgent = submit(busy, "flood", 5, priority=-1)
    assert first_tokens(busy)[:5] == urgent


def test_what_began_elsewhere_comes_before_what_is_new_whoever_it_is() -> None:
    busy = planner(max_num_seqs=1)
    submit(busy, "calm", 2)
    moved = submit(busy, "flood", 3, num_generated=2)
    assert first_tokens(busy)[:3] == moved


def test_prompts_in_the_making_share_the_steps_by_tenant() -> None:
    """All seats are free, and the prefill tokens of a step are what is short."""
    busy = planner(max_num_seqs=32, max_batched_tokens=64, prefill_chunk_tokens=32)
    submit(busy, "flood", 20, num_prompt=90)
    step = busy.plan()
    assert step is not None
    settle(busy, step)
    submit(busy, "other", num_prompt=90)
    shares = []
    for _ in range(3):
        step = busy.plan()
        assert step is not None
        settle(busy, step)
        shares.append(sorted((chunk.sequence_id, chunk.length) for chunk in step.chunks))
    assert [dict(pairs)[21] for pairs in shares] == [32, 32, 26]


def test_turns_follow_the_weights() -> None:
    busy = planner(max_num_seqs=32, max_batched_tokens=40, prefill_chunk_tokens=8, tenant_weights={"a": 4.0})
    submit(busy, "a", 8, num_prompt=80)
    submit(busy, "b", 8, num_prompt=79)
    had = {"a": 0, "b": 0}
    for _ in range(8):
        step = busy.plan()
        assert step is not None
        for chunk in step.chunks:
            had["a" if chunk.num_prompt == 80 else "b"] += chunk.length
        settle(busy, step)
    assert had == {"a": 256, "b": 64}


def test_what_goes_before_a_request_depends_on_whose_it_is() -> None:
    busy = planner(max_num_seqs=1)
    submit(busy, "flood", 11, num_prompt=10)
    step = busy.plan()  # the first one runs
    assert step is not None
    settle(busy, step)
    flood, other = fake_request(range(1, 11), tenant="flood"), fake_request(range(1, 11), tenant="other")
    assert busy.tokens_before(flood) == 100
    assert busy.tokens_before(other) == 0
    submit(busy, "other", 3, num_prompt=10)
    assert busy.tokens_before(other) == 50  # three of its own, two of the flood's in between
    assert busy.tokens_before(fake_request(priority=1)) == 130
    assert busy.tokens_before(fake_request(priority=-1)) == 0


def test_own_turns_of_prompts_in_the_making_go_before_too() -> None:
    busy = planner(max_num_seqs=8, max_batched_tokens=16, prefill_chunk_tokens=8)
    submit(busy, "a", 3, num_prompt=30)
    step = busy.plan()
    assert step is not None
    assert busy.tokens_before(fake_request(tenant="a")) == 24
    assert busy.tokens_before(fake_request(tenant="b")) == 0


def test_a_queue_is_bounded_in_tokens_and_takes_one_long_prompt_all_the_same() -> None:
    small = planner(max_waiting_tokens=50)
    submit(small, "", num_prompt=60)
    assert small.num_queued_tokens == 60
    with pytest.raises(QueueFull, match="60 tokens wait to be prefilled: with 1 more they would be over 50"):
        submit(small, "", num_prompt=1)
    assert small.num_queued_tokens == 60

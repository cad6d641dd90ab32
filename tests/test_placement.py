"""Which worker takes a request, and how a gateway's view of the workers is kept fresh."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import MAX_RETRY_AFTER_S, Candidate, Need, assign
from cluster.router import Router, WorkerInfo
from planner.errors import QueueFull, Unavailable
from planner.limits import Snapshot
from planner.request import Request

IDLE = Candidate(
    worker_id="a",
    accepts=True,
    free_cells=1000,
    num_running=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    max_num_seqs=8,
    max_waiting=16,
    max_prefill_tokens=64,
)

counts = st.integers(0, 40)
needs = st.builds(Need, prompt_tokens=st.integers(1, 500), num_sequences=st.integers(1, 4))


@st.composite
def fleets(draw: st.DrawFn) -> list[Candidate]:
    return [
        Candidate(
            worker_id=f"w{index}",
            accepts=draw(st.booleans()),
            free_cells=draw(st.integers(0, 1000)),
            num_running=draw(counts),
            num_waiting=draw(counts),
            queued_prefill_tokens=draw(st.integers(0, 5000)),
            max_num_seqs=draw(st.integers(1, 40)),
            max_waiting=draw(st.integers(1, 40)),
            max_prefill_tokens=draw(st.integers(2, 512)),
        )
        for index in range(draw(st.integers(0, 5)))
    ]


def test_an_idle_worker_is_preferred_to_a_busy_one() -> None:
    busy = replace(IDLE, worker_id="busy", queued_prefill_tokens=500, num_running=4)
    assert assign(Need(10, 1), [busy, IDLE]) == "a"


def test_running_decodes_weigh_as_much_as_the_steps_they_share() -> None:
    decoding = replace(IDLE, worker_id="decoding", num_running=7)
    queued = replace(IDLE, worker_id="queued", queued_prefill_tokens=64)
    assert assign(Need(10, 1), [queued, decoding]) == "decoding"


def test_a_worker_without_a_free_seat_is_the_last_choice() -> None:
    seated = replace(IDLE, worker_id="seated", num_running=8)
    far = replace(IDLE, worker_id="far", queued_prefill_tokens=10_000)
    assert assign(Need(10, 1), [seated, far]) == "far"


def test_a_prompt_that_does_not_fit_now_goes_where_it_does() -> None:
    full = replace(IDLE, worker_id="full", free_cells=5)
    far = replace(IDLE, worker_id="far", queued_prefill_tokens=900)
    assert assign(Need(10, 1), [full, far]) == "far"


def test_ties_go_to_the_first_candidate() -> None:
    assert assign(Need(10, 1), [replace(IDLE, worker_id="b"), IDLE]) == "b"


def test_full_queues_say_when_to_come_again() -> None:
    full = replace(IDLE, num_waiting=16)
    refusal = assign(Need(10, 1), [full, full])
    assert isinstance(refusal, QueueFull)
    assert refusal.retry_after_s == 3.0


@given(needs, fleets())
def test_only_a_worker_that_accepts_and_has_room_is_chosen(need: Need, fleet: list[Candidate]) -> None:
    choice = assign(need, fleet)
    able = {c.worker_id for c in fleet if c.accepts and c.num_waiting < c.max_waiting}
    if isinstance(choice, str):
        assert choice in able
    elif isinstance(choice, QueueFull):
        assert not able
        assert any(c.accepts for c in fleet)
        assert 1.0 <= choice.retry_after_s <= MAX_RETRY_AFTER_S
    else:
        assert isinstance(choice, Unavailable)
        assert not any(c.accepts for c in fleet)


@given(needs, fleets(), st.data())
def test_more_load_on_another_worker_never_moves_a_request_to_it(
    need: Need, fleet: list[Candidate], data: st.DataObject
) -> None:
    choice = assign(need, fleet)
    others = [index for index, c in enumerate(fleet) if c.worker_id != choice]
    if not isinstance(choice, str) or not others:
        return
    index = data.draw(st.sampled_from(others))
    heavier = replace(
        fleet[index],
        queued_prefill_tokens=fleet[index].queued_prefill_tokens + data.draw(counts),
        num_running=fleet[index].num_running + data.draw(counts),
        free_cells=max(0, fleet[index].free_cells - data.draw(counts)),
    )
    assert assign(need, [*fleet[:index], heavier, *fleet[index + 1 :]]) == choice


def info(worker_id: str, **changes: int) -> WorkerInfo:
    base = WorkerInfo(worker_id, "m", 100, 512, num_cells=1000, max_prefill_tokens=64, max_num_seqs=8)
    return replace(base, **changes)


def snapshot(step: int, **changes: int) -> Snapshot:
    base = Snapshot(1000, 1000, 0, 0, num_running=0, num_waiting=0, queued_prefill_tokens=0, step=step)
    return replace(base, **changes)


def request(length: int = 10, n: int = 1) -> Request:
    return Request(prompt=np.zeros(length, np.int64), max_tokens=5, n=n)


def test_a_burst_is_spread_before_any_worker_has_reported() -> None:
    router = Router(max_waiting=16)
    for worker_id in ("a", "b", "c"):
        router.join(info(worker_id))
    chosen = [router.assign(number, request()) for number in range(9)]
    assert sorted(chosen) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_what_was_sent_counts_until_the_snapshot_must_hold_it() -> None:
    router = Router(max_waiting=16)
    router.join(info("a"))
    router.join(info("b"))
    assert router.assign(1, request()) == "a"
    router.observe("a", snapshot(1), draining=False)  # this step was planned before the request came
    assert router.assign(2, request()) == "b"
    router.observe("a", snapshot(2), draining=False)
    assert router.assign(3, request()) == "a"


def test_a_settled_request_no_longer_counts() -> None:
    router = Router(max_waiting=16)
    router.join(info("a"))
    router.join(info("b"))
    assert router.assign(1, request()) == "a"
    router.settle("a", 1)
    assert router.assign(2, request()) == "a"


def test_gateways_with_equal_views_break_ties_differently() -> None:
    chosen = []
    for offset in range(2):
        router = Router(max_waiting=16, offset=offset)
        router.join(info("a"))
        router.join(info("b"))
        chosen.append(router.assign(1, request()))
    assert chosen == ["a", "b"]


def test_a_draining_worker_gets_nothing_and_without_another_one_the_router_is_not_ready() -> None:
    router = Router(max_waiting=16)
    assert not router.ready
    router.join(info("a"))
    assert router.ready
    router.observe("a", snapshot(1), draining=True)
    assert not router.ready
    with pytest.raises(Unavailable, match="no worker takes requests"):
        router.assign(1, request())


def test_a_burst_beyond_every_queue_is_refused_before_it_is_sent() -> None:
    router = Router(max_waiting=2)
    router.join(info("a", max_num_seqs=1))
    for number in range(3):
        router.assign(number, request())
    with pytest.raises(QueueFull):
        router.assign(3, request())


def test_a_worker_that_left_is_forgotten_with_all_that_was_sent_to_it() -> None:
    router = Router(max_waiting=2)
    router.join(info("a"))
    router.assign(1, request(n=8))
    router.leave("a")
    router.observe("a", snapshot(5), draining=False)
    assert not router.ready
    assert router.infos == []
    router.join(info("a"))
    assert router.assign(2, request(n=8)) == "a"

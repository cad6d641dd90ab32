"""Which worker takes a request, and how a gateway's view of the workers is kept fresh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.placement import Candidate, Candidates, Need, able, assign
from cluster.router import Predictions, Router, WorkerInfo
from planner.blocks import BlockChanges, block_hashes
from planner.errors import QueueFull, RaycombError, Unavailable
from planner.limits import Snapshot
from planner.request import Request
from worker.queue_rate import LONGEST_RETRY_S

IDLE = Candidate(
    accepts=True,
    free_cells=1000,
    num_running=0,
    num_seats_wanted=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    max_num_seqs=8,
    max_waiting=16,
    max_waiting_tokens=100_000,
    max_prefill_tokens=64,
    queue_tokens_per_s=0,
)

counts = st.integers(0, 40)
needs = st.builds(Need, prompt_tokens=st.integers(1, 500), num_sequences=st.integers(1, 4))


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    num_running, num_waiting = draw(counts), draw(counts)
    return Candidate(
        accepts=draw(st.booleans()),
        free_cells=draw(st.integers(0, 1000)),
        num_running=num_running,
        num_seats_wanted=num_running + num_waiting,
        num_waiting=num_waiting,
        queued_prefill_tokens=draw(st.integers(0, 5000)),
        max_num_seqs=draw(st.integers(1, 40)),
        max_waiting=draw(st.integers(1, 40)),
        max_waiting_tokens=draw(st.integers(1, 5000)),
        max_prefill_tokens=draw(st.integers(2, 512)),
        queue_tokens_per_s=draw(st.integers(0, 1000)),
    )


fleets = st.lists(st.tuples(candidates(), st.integers(0, 499)), max_size=5)  # with the tokens that each has cached


def choose(need: Need, fleet: Sequence[Candidate], cached: Sequence[int] = (), turn: int = 0) -> int | RaycombError:
    """The place of the chosen one, or the refusal."""
    table = Candidates()
    for row, candidate in enumerate(fleet):
        table[row] = candidate
    rows = able(table, np.arange(len(fleet)))
    if isinstance(rows, RaycombError):
        return rows
    tokens = np.zeros(len(table), np.int64)
    tokens[: len(cached)] = cached
    return assign(need, table, rows, tokens, turn)


def test_an_idle_worker_is_preferred_to_a_busy_one() -> None:
    busy = IDLE._replace(queued_prefill_tokens=500, num_running=4, num_seats_wanted=4)
    assert choose(Need(10, 1), [busy, IDLE]) == 1


def test_running_decodes_weigh_as_much_as_the_steps_they_share() -> None:
    decoding = IDLE._replace(num_running=7)
    queued = IDLE._replace(queued_prefill_tokens=64)
    assert choose(Need(10, 1), [queued, decoding]) == 1


def test_a_worker_without_a_free_seat_is_the_last_choice() -> None:
    seated = IDLE._replace(num_running=8, num_seats_wanted=8)
    far = IDLE._replace(queued_prefill_tokens=10_000)
    assert choose(Need(10, 1), [seated, far]) == 1


def test_a_prompt_that_does_not_fit_now_goes_where_it_does() -> None:
    full = IDLE._replace(free_cells=5)
    far = IDLE._replace(queued_prefill_tokens=900)
    assert choose(Need(10, 1), [full, far]) == 1


def test_the_turn_decides_ties_and_nothing_else() -> None:
    fleet = [IDLE, IDLE._replace(num_running=1), IDLE]
    assert [choose(Need(10, 1), fleet, turn=turn) for turn in range(4)] == [0, 2, 0, 2]


def test_a_resident_prefix_is_worth_the_prefill_that_it_saves() -> None:
    queued = IDLE._replace(queued_prefill_tokens=40)
    assert choose(Need(100, 1), [IDLE, queued], [0, 64]) == 1
    assert choose(Need(100, 1), [IDLE, queued], [0, 5]) == 0


def test_a_hot_worker_loses_its_affinity_and_the_others_keep_theirs() -> None:
    hot = IDLE._replace(num_running=24, num_seats_wanted=24, max_num_seqs=64)
    warm = IDLE._replace(num_running=6, num_seats_wanted=6, max_num_seqs=64)
    cold = warm._replace(num_running=5, num_seats_wanted=5)
    assert choose(Need(400, 1), [hot, warm, cold], [384, 0, 0]) == 2
    assert choose(Need(400, 1), [hot, warm, cold], [384, 384, 0]) == 1
    assert choose(Need(400, 1), [warm, warm, cold], [384, 0, 0]) == 0


def test_full_queues_say_when_to_come_again() -> None:
    """As soon as the first queue is through, at the rate that its worker measured."""
    full = IDLE._replace(num_waiting=16, queued_prefill_tokens=3500, queue_tokens_per_s=100)
    overfull = IDLE._replace(queued_prefill_tokens=4000, max_waiting_tokens=4000, queue_tokens_per_s=500)
    for fleet, seconds in (([full, overfull], 8.0), ([full], 35.0), ([full._replace(queue_tokens_per_s=0)], 1.0)):
        refusal = choose(Need(10, 1), fleet)
        assert isinstance(refusal, QueueFull)
        assert refusal.retry_after_s == seconds


def test_a_queue_may_be_full_of_tokens() -> None:
    overfull = IDLE._replace(queued_prefill_tokens=4000, max_waiting_tokens=4000)
    assert choose(Need(1, 1), [overfull, IDLE]) == 1
    assert isinstance(choose(Need(1, 1), [overfull]), QueueFull)


@given(needs, fleets, st.integers(0, 2**64 - 1))
def test_only_a_worker_that_accepts_and_has_room_is_chosen(
    need: Need, fleet: list[tuple[Candidate, int]], turn: int
) -> None:
    workers = [candidate for candidate, _ in fleet]
    choice = choose(need, workers, [cached for _, cached in fleet], turn)
    fit = {
        place
        for place, c in enumerate(workers)
        if c.accepts and c.num_waiting < c.max_waiting and c.queued_prefill_tokens < c.max_waiting_tokens
    }
    if isinstance(choice, int):
        assert choice in fit
    elif isinstance(choice, QueueFull):
        assert not fit
        assert any(c.accepts for c in workers)
        assert 1.0 <= choice.retry_after_s <= LONGEST_RETRY_S
    else:
        assert isinstance(choice, Unavailable)
        assert not any(c.accepts for c in workers)


@given(needs, fleets, st.data())
def test_more_load_on_another_worker_never_moves_a_request_to_it(
    need: Need, fleet: list[tuple[Candidate, int]], data: st.DataObject
) -> None:
    workers, cached = [candidate for candidate, _ in fleet], [tokens for _, tokens in fleet]
    choice = choose(need, workers, cached)
    others = [place for place in range(len(workers)) if place != choice]
    if not isinstance(choice, int) or not others:
        return
    place = data.draw(st.sampled_from(others))
    more = data.draw(counts)
    heavier = workers[place]._replace(
        queued_prefill_tokens=workers[place].queued_prefill_tokens + data.draw(counts),
        num_running=workers[place].num_running + more,
        num_seats_wanted=workers[place].num_seats_wanted + more,
        free_cells=max(0, workers[place].free_cells - data.draw(counts)),
    )
    assert choose(need, [*workers[:place], heavier, *workers[place + 1 :]], cached) != place


@given(needs, fleets, st.data())
def test_more_of_its_prompt_resident_never_moves_a_request_away(
    need: Need, fleet: list[tuple[Candidate, int]], data: st.DataObject
) -> None:
    workers, cached = [candidate for candidate, _ in fleet], [tokens for _, tokens in fleet]
    choice = choose(need, workers, cached)
    if isinstance(choice, int):
        warmer = list(cached)
        warmer[choice] += data.draw(counts)
        assert choose(need, workers, warmer) == choice or warmer[choice] == cached[choice]


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


def test_a_worker_that_one_request_fills_with_sequences_still_has_its_whole_queue() -> None:
    router = Router(max_waiting=2)
    router.join(info("a", max_num_seqs=8))
    for number in range(3):  # one runs, two wait: the worker counts requests in its queue
        assert router.assign(number, request(n=8)) == "a"
    with pytest.raises(QueueFull):
        router.assign(3, request())


def prompt(length: int, seed: int = 0) -> Request:
    return Request(prompt=np.random.default_rng(seed).integers(0, 100, length), max_tokens=5)


def told(asked: Request) -> BlockChanges:
    """What a worker says once it has computed the prompt."""
    return BlockChanges(added=tuple(block_hashes(asked.prompt)))


def router_of(*worker_ids: str) -> Router:
    router = Router(max_waiting=16)
    for worker_id in worker_ids:
        router.join(info(worker_id))
    return router


def test_a_request_goes_where_its_prefix_is_resident_until_it_is_evicted() -> None:
    asked = prompt(300)
    for owner in "abc":
        router = router_of("a", "b", "c")
        router.learn(owner, told(asked))
        assert router.assign(1, asked) == owner
        router.settle(owner, 1, 256)
        router.observe(owner, snapshot(1, queued_prefill_tokens=50), draining=False)
        assert router.assign(2, asked) == owner
        router.settle(owner, 2, 256)
        router.learn(owner, BlockChanges(removed=told(asked).added))
        assert router.assign(3, asked) != owner


def test_a_burst_of_one_prefix_stays_together_before_any_worker_has_told_of_it() -> None:
    router = router_of("a", "b", "c")
    assert len({router.assign(number, prompt(300)) for number in range(4)}) == 1


def test_cold_prefixes_are_spread_over_idle_workers() -> None:
    router = router_of("a", "b", "c")
    chosen = set()
    for number in range(30):
        worker_id = router.assign(number, prompt(300, number))
        router.settle(worker_id, number)
        chosen.add(worker_id)
    assert chosen == {"a", "b", "c"}


def test_gateways_with_equal_views_send_a_cold_prefix_to_the_same_worker() -> None:
    first, second = Router(max_waiting=16, offset=0), Router(max_waiting=16, offset=1)
    for worker_id in "abc":
        first.join(info(worker_id))
    for worker_id in "cba":
        second.join(info(worker_id))
    for seed in range(10):
        chosen = first.assign(seed, prompt(300, seed))
        assert second.assign(seed, prompt(300, seed)) == chosen
        first.settle(chosen, seed)
        second.settle(chosen, seed)


def test_what_a_request_was_expected_to_leave_is_forgotten_when_it_was_refused() -> None:
    router = router_of("a", "b")
    asked = prompt(300)
    worker_id = router.assign(1, asked)
    router.settle(worker_id, 1)
    router.observe(worker_id, snapshot(1, queued_prefill_tokens=10), draining=False)
    assert router.assign(2, asked) != worker_id


def test_predictions_are_held_against_what_was_found() -> None:
    router = router_of("a")
    for number, found in enumerate((0, 256, 64)):
        router.assign(number, prompt(300))
        router.settle("a", number, found)
        router.learn("a", told(prompt(300)))
    router.assign(9, prompt(300))
    router.settle("a", 9)  # it was cancelled
    assert router.predictions == Predictions(3, 900, num_predicted_tokens=512, num_cached_tokens=320)


def test_a_worker_that_left_and_came_back_has_nothing_resident() -> None:
    router = router_of("a", "b")
    asked = prompt(300)
    router.learn("a", told(asked))
    router.leave("a")
    router.learn("a", told(asked))
    router.join(info("a"))
    router.observe("a", snapshot(1, queued_prefill_tokens=10), draining=False)
    assert router.assign(1, asked) == "b"


def test_a_draining_worker_attracts_nothing() -> None:
    router = router_of("a", "b")
    asked = prompt(300)
    router.learn("a", told(asked))
    router.observe("a", snapshot(1), draining=True)
    assert router.assign(1, asked) == "b"


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_wherever_it_goes() -> None:
    router = router_of("a", "b")
    asked = replace(prompt(300), prompt_logprobs=True)
    router.learn("a", told(asked))
    router.observe("a", snapshot(1, queued_prefill_tokens=10), draining=False)
    assert router.assign(1, asked) == "b"


def test_what_waiting_prompts_will_find_resident_does_not_make_a_queue_look_long() -> None:
    router = router_of("a", "b")
    asked = prompt(600)
    router.learn("b", told(asked))
    for number in range(4):
        assert router.assign(number, asked) == "b"
    router.observe("b", snapshot(9, num_waiting=4, queued_prefill_tokens=2400), draining=False)
    assert router.assign(4, asked) == "b"
    for number in range(4):
        router.settle("b", number)
    # Now it is other prompts that wait, of which this gateway knows nothing.
    assert router.assign(5, asked) == "a"

"""Which worker takes a request, by what is known of the workers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.placement import Candidate, Candidates, Need, Surplus, able, assign, surplus
from planner.errors import QueueFull, RaycombError, Unavailable
from worker.queue_rate import LONGEST_RETRY_S

IDLE = Candidate(
    accepts=True,
    free_cells=1000,
    num_running=0,
    num_seats_wanted=0,
    num_waiting=0,
    queued_prefill_tokens=0,
    answer_tokens=0,
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
        answer_tokens=draw(st.integers(0, 5000)),
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


def test_what_is_left_to_draw_decides_between_workers_that_are_equal_otherwise() -> None:
    long, short = (IDLE._replace(num_running=4, answer_tokens=left) for left in (1000, 900))
    assert choose(Need(10, 1), [long, short]) == 1


def test_for_even_work_no_first_token_waits_longer_than_a_step() -> None:
    long = IDLE._replace(num_running=4, answer_tokens=10_000)
    for num_queued, chosen in ((30, 1), (200, 0)):
        assert choose(Need(10, 1), [long, IDLE._replace(num_running=4, queued_prefill_tokens=num_queued)]) == chosen


def test_a_resident_prefix_outweighs_longer_answers() -> None:
    assert choose(Need(500, 1), [IDLE, IDLE._replace(answer_tokens=10_000)], [0, 450]) == 1


def test_a_worker_without_a_free_seat_is_the_last_choice() -> None:
    seated = IDLE._replace(num_running=8, num_seats_wanted=8)
    far = IDLE._replace(queued_prefill_tokens=10_000)
    assert choose(Need(10, 1), [seated, far]) == 1


def test_a_prompt_that_does_not_fit_now_goes_where_it_does() -> None:
    full = IDLE._replace(free_cells=5)
    far = IDLE._replace(queued_prefill_tokens=900)
    assert choose(Need(10, 1), [full, far]) == 1


def test_a_prefix_that_is_resident_needs_no_new_cells() -> None:
    """A full pool is where many sequences share a prefix. Sent elsewhere, the next one computes a copy there, whose
    cells are taken from other prefixes."""
    full = IDLE._replace(free_cells=20)
    assert choose(Need(100, 1), [IDLE, full], [0, 90]) == 1
    assert choose(Need(100, 1), [IDLE, full], [0, 70]) == 0


def test_a_request_that_goes_on_with_something_goes_to_its_owner_while_that_takes_any() -> None:
    busy = IDLE._replace(queued_prefill_tokens=9000, num_running=8, num_seats_wanted=20)
    assert choose(Need(10, 1, owner=1), [IDLE, busy]) == 1
    for unable in (busy._replace(accepts=False), busy._replace(num_waiting=16)):
        assert choose(Need(10, 1, owner=1), [IDLE, unable]) == 0


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


def surplus_of(*fleet: Candidate) -> dict[int, Surplus]:
    table = Candidates()
    for row, candidate in enumerate(fleet):
        table[row] = candidate
    return surplus(table, np.arange(len(fleet)))


FULL = IDLE._replace(num_running=8, num_seats_wanted=13, num_waiting=5, queued_prefill_tokens=50)


def test_what_waits_for_a_seat_would_find_one_elsewhere() -> None:
    busy = IDLE._replace(num_running=5, num_seats_wanted=5)
    assert surplus_of(FULL, busy) == {0: Surplus(5, 3)}
    assert surplus_of(FULL, IDLE) == {0: Surplus(5, 5)}
    assert surplus_of(FULL, FULL, busy._replace(num_seats_wanted=2)) == {0: Surplus(5, 5), 1: Surplus(5, 1)}


def test_what_waits_for_cells_would_find_them_elsewhere() -> None:
    starved = IDLE._replace(num_running=2, num_seats_wanted=4, num_waiting=2, queued_prefill_tokens=900, free_cells=100)
    assert surplus_of(starved, IDLE) == {0: Surplus(2, 2)}
    assert surplus_of(starved, starved) == {}


def test_what_runs_in_a_moment_or_would_wait_elsewhere_too_stays() -> None:
    arriving = IDLE._replace(num_seats_wanted=3, num_waiting=3, queued_prefill_tokens=60)
    assert surplus_of(arriving, IDLE) == {}
    assert surplus_of(FULL, FULL) == {}
    assert surplus_of(FULL, IDLE._replace(accepts=False)) == {}

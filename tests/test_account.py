"""Steps are explained by the numbers that made them, and a pool's account adds up whatever happens."""

from __future__ import annotations

import random

from planner.account import account_for
from planner.inspection import MAX_BINS, Phase
from planner.request import FinishReason
from tests.fakes import fake_request
from tests.planner_life import new_life


def test_a_padded_step_of_decodes_says_which_width_it_took_and_how_many_rows_are_empty() -> None:
    life = new_life(widths=(1, 4, 8), max_num_seqs=8)
    for first in range(5):
        life.submit(fake_request([first, 7], 4))
    life.step()
    step, _ = life.step()
    account = account_for(step, life.planner.limits)
    (piece,) = account.slices
    assert (piece.method, piece.length, piece.width, piece.num_padded) == ("decode", 5, 8, 3)
    assert "8 is the narrowest decode width that holds 5, so 3 rows hold no token" in piece.why
    assert {chunk.why for chunk in account.chunks} == {"decodes: one token a step"}


def test_the_chunks_of_a_long_prompt_say_how_much_is_left() -> None:
    life = new_life(max_batched_tokens=8, prefill_chunk_tokens=8, max_prefill_tokens=8)
    life.submit(fake_request(range(20), 2))
    accounts = [account_for(life.step()[0], life.planner.limits) for _ in range(3)]
    assert [account.chunks[0].why for account in accounts] == [
        "prefills 8 of 20 prompt tokens; 12 are left for later",
        "prefills 8 of 20 prompt tokens; 4 are left for later",
        "prefills the last 4 of 20 prompt tokens; 16 were there",
    ]
    assert [piece.why for piece in accounts[0].slices] == ["one prefill: 8 tokens lie in [m = 2, W = 8]"]


def test_a_remainder_below_m_says_why_it_is_a_decode() -> None:
    life = new_life(max_batched_tokens=9, prefill_chunk_tokens=9, max_prefill_tokens=8)
    life.submit(fake_request(range(9), 2))
    account = account_for(life.step()[0], life.planner.limits)
    assert [(piece.method, piece.length) for piece in account.slices] == [("prefill", 8), ("decode", 1)]
    assert "narrower than the narrowest prefill, m = 2" in account.slices[1].why


def test_an_inspection_names_every_sequence_and_what_it_holds() -> None:
    life = new_life(max_num_seqs=3, capacity=40)
    life.submit(fake_request(range(10), 5, n=2, tenant="acme"))
    life.submit(fake_request(range(30, 34), 5))
    life.submit(fake_request(range(40, 44), 5))
    before = life.planner.inspect()
    assert [s.phase for s in before.sequences] == [Phase.WAITING, Phase.UNFORKED, Phase.WAITING, Phase.WAITING]
    life.step()
    after = life.planner.inspect()
    assert [(s.request, s.index, s.phase) for s in after.sequences] == [
        (1, 0, Phase.DECODING),
        (1, 1, Phase.PREFILLING),  # forks compute the prompt's last token for themselves
        (2, 0, Phase.DECODING),
        (3, 0, Phase.WAITING),
    ]
    assert [s.num_cells for s in after.sequences] == [10, 9, 4, 0]
    assert after.sequences[0].tenant == "acme"
    pool = after.pool
    assert (pool.owned, pool.referenced, pool.free) == (14, 23, 26)  # nine cells of the prompt are shared
    assert pool.adds_up
    assert {span.owner for span in pool.map} == {"free", *(str(s.sequence) for s in after.sequences[:3])}


def test_a_map_has_a_bounded_number_of_bins_that_cover_the_pool() -> None:
    for capacity in (1, 7, MAX_BINS, MAX_BINS + 1, 5000):
        pool = new_life(capacity=capacity).planner.inspect().pool
        assert sum(span.num_bins for span in pool.map) == -(-capacity // pool.cells_per_bin) <= MAX_BINS
        assert [span.owner for span in pool.map] == ["free"]


def test_a_pool_adds_up_at_every_moment_of_a_crowded_life() -> None:
    chance = random.Random(3)
    life = new_life(capacity=28, max_num_seqs=6, prefill_chunk_tokens=5, prefix_caching=True)
    submitted: list[int] = []
    for _ in range(120):
        if chance.random() < 0.5:
            prompt = list(range(chance.randint(1, 12)))
            submitted.append(life.submit(fake_request(prompt, chance.randint(1, 8), n=chance.randint(1, 3))))
        if submitted and chance.random() < 0.2:
            life.planner.cancel(chance.choice(submitted))
        if life.planner.has_work:
            life.step()
        pool = life.planner.inspect().pool
        assert pool.adds_up
        assert pool.free + pool.owned + pool.cached == pool.capacity
        assert pool.referenced >= pool.owned
    assert life.planner.metrics.num_preemptions > 0
    assert life.planner.metrics.finished[FinishReason.CANCELLED] > 0


def test_an_account_that_does_not_add_up_says_so() -> None:
    life = new_life(capacity=40)
    life.submit(fake_request(range(10), 5))
    life.step()
    table = life.planner._memory.table
    table._num_cached += 1
    assert not life.planner.inspect().pool.adds_up

"""The sampler: order of its filters, what they keep, penalties, and the draw's place behind them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.request import SamplingParams
from worker.logprobs import token_logprobs
from worker.race import torch_race
from worker.sampler import Draw, keep_likely, sample

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0, 0.0])


def draw(position: int = 1, **options: Any) -> Draw:
    extras = {key: options.pop(key) for key in ("history", "num_prompt", "masked") if key in options}
    return Draw(SamplingParams(**options), position, **extras)


def one(logits: torch.Tensor, which: Draw) -> int:
    return int(sample(logits[None], [which]).tokens[0])


def kept(logits: torch.Tensor, **options: Any) -> list[int]:
    left = keep_likely(logits.softmax(-1)[None], [SamplingParams(**options)])
    return left[0].nonzero()[:, 0].tolist()


def test_greedy_takes_the_lowest_id_on_ties_and_ignores_filters() -> None:
    assert one(LOGITS, draw(temperature=0.0, top_k=1, top_p=0.1)) == 1


def test_tokens_come_in_proportion_to_their_probability() -> None:
    num_draws = 4000
    expected = (LOGITS / 0.7).softmax(-1)
    drawn = sample(
        LOGITS.expand(num_draws, -1), [draw(position, temperature=0.7, seed=9) for position in range(4000)]
    ).tokens
    counts = Counter(drawn.tolist())
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / num_draws - probability) < 0.03


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_seed_draws_at_every_position_anew(seed: int) -> None:
    drawn = sample(torch.zeros(500, 8), [draw(position, seed=seed) for position in range(500)]).tokens
    counts = torch.bincount(drawn, minlength=8)
    assert ((counts - 62.5).abs() < 4.5 * math.sqrt(62.5)).all()


def test_a_draw_is_the_race_of_what_the_filters_keep() -> None:
    left = keep_likely((LOGITS / 0.7).softmax(-1)[None], [SamplingParams(top_k=4)])
    for position in range(100):
        which = draw(position, temperature=0.7, top_k=4, seed=5)
        assert one(LOGITS, which) == int(torch_race(left, [5], [position])[0])


def test_top_k_keeps_the_lowest_ids_where_the_kth_ties() -> None:
    assert kept(torch.tensor([2.0, 1.0, 1.0, 1.0]), top_k=2) == [0, 1]
    assert kept(LOGITS, top_k=1) == [1]
    assert kept(LOGITS, top_k=6) == [0, 1, 2, 3, 4, 5]


def test_top_p_keeps_through_the_first_token_past_the_mass() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert kept(logits, top_p=0.39) == [3]
    assert kept(logits, top_p=0.41) == [2, 3]
    assert kept(logits, top_p=0.71) == [1, 2, 3]
    assert kept(logits, top_p=0.0) == [3]


def test_top_k_comes_first_and_top_p_shares_what_it_left() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert kept(logits, top_k=2, top_p=0.5) == [3]  # 0.4 / 0.7 exceeds 0.5
    assert kept(logits, top_k=2, top_p=0.6) == [2, 3]


def test_min_p_is_measured_against_the_best() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log()
    assert kept(logits, min_p=0.6) == [2, 3]
    assert kept(logits, min_p=1.0) == [3]


def naive_kept(probabilities: list[float], top_k: int, top_p: float) -> list[int]:
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    order = order[: top_k or None]
    total, before, kept_ids = sum(probabilities[token] for token in order), 0.0, []
    for token in order:
        if top_p < 1 and before > top_p * total:
            break
        kept_ids.append(token)
        before += probabilities[token]
    return sorted(kept_ids)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.integers(1, 8), min_size=2, max_size=700),
    top_k=st.integers(0, 600),
    top_p=st.sampled_from([0.1, 0.33, 0.77, 0.95, 1.0]),
)
def test_filters_equal_a_naive_sort(weights: list[int], top_k: int, top_p: float) -> None:
    # Powers of two as the total: every probability and sum is exact, so ties are ties.
    scale = 2.0 ** math.ceil(math.log2(sum(weights)))
    probabilities = torch.tensor(weights) / scale
    left = keep_likely(probabilities[None], [SamplingParams(top_k=top_k, top_p=top_p)])
    assert left[0].nonzero()[:, 0].tolist() == naive_kept(probabilities.tolist(), top_k, top_p)


def test_a_row_draws_the_same_with_any_batch_mates() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 1000)
    draws = [
        draw(7, seed=1),
        draw(8, temperature=0.0),
        draw(9, seed=3, top_p=0.5),
        draw(10, seed=4, top_k=400, logit_bias=((3, 5.0),)),
        draw(11, seed=5, min_p=0.1, masked=frozenset({1, 2})),
    ]
    before = logits.clone()
    assert sample(logits, draws).tokens.tolist() == [one(row, which) for row, which in zip(logits, draws, strict=True)]
    assert torch.equal(logits, before)


def test_penalties_read_what_was_said() -> None:
    history = np.array([1, 1, 3, 3, 2])
    assert one(LOGITS, draw(5, temperature=0.0, frequency_penalty=2.0, history=history, num_prompt=3)) == 1
    assert one(LOGITS, draw(5, temperature=0.0, frequency_penalty=2.0, history=history, num_prompt=0)) == 0
    assert one(LOGITS, draw(5, temperature=0.0, presence_penalty=1.5, history=history[:4], num_prompt=0)) == 2
    assert one(LOGITS, draw(5, temperature=0.0, repetition_penalty=4.0, history=history[2:], num_prompt=3)) == 1
    assert one(LOGITS, draw(5, temperature=0.0, repetition_penalty=4.0, history=history, num_prompt=5)) == 0
    negative = torch.tensor([-1.0, -1.5])
    assert one(negative, draw(1, temperature=0.0, repetition_penalty=2.0, history=np.array([0]), num_prompt=1)) == 1


def test_bias_and_masks_apply_to_greedy_and_sampled_rows() -> None:
    assert one(LOGITS, draw(temperature=0.0, logit_bias=((4, 100.0),))) == 4
    assert one(LOGITS, draw(temperature=0.0, logit_bias=((1, -100.0),), masked=frozenset({3}))) == 2
    for position in range(50):
        assert one(LOGITS, draw(position, masked=frozenset({0, 1, 2, 3, 5}))) == 4


def test_where_only_one_token_is_kept_it_is_drawn() -> None:
    for position in range(50):
        assert one(LOGITS, draw(position, top_k=1)) == 1
        assert one(LOGITS, draw(position, top_p=0.0)) == 1


def test_a_tiny_temperature_is_greedy_and_stays_finite() -> None:
    assert one(LOGITS * 100, draw(temperature=1e-300)) in (1, 3)
    assert one(torch.tensor([1.0, 2.0, 3.0]), draw(temperature=1e-30)) == 2


def test_logprobs_are_of_the_raw_logits_lowest_id_first_on_ties() -> None:
    expected = LOGITS.log_softmax(-1)
    (row,) = token_logprobs(LOGITS[None], [4], [3])
    assert (row.token, row.logprob) == (4, pytest.approx(float(expected[4])))
    assert [token for token, _ in row.top] == [1, 3, 2]
    assert row.top[0][1] == pytest.approx(float(expected[1]))
    (cut_tie,) = token_logprobs(LOGITS[None], [0], [1])
    assert [token for token, _ in cut_tie.top] == [1]
    (alone,) = token_logprobs(LOGITS[None], [0], [0])
    assert alone.top == ()


def test_a_bad_word_is_never_completed() -> None:
    params = SamplingParams(temperature=0.0, bad_words=((4,), (7, 8, 3), (1, 2)))
    logits = torch.tensor([[0.0, 1.0, 2.0, 5.0, 9.0, 3.0]])

    def drawn(*generated: int) -> int:
        history = np.array([7, 8, *generated], dtype=np.int64)
        return int(sample(logits, [Draw(params, len(history), history, num_prompt=2)]).tokens[0])

    assert drawn() == 3  # the prompt's own 7, 8 begin no word of the answer
    assert drawn(8) == 3
    assert drawn(7, 8) == 5
    assert drawn(7, 8, 1) == 3


def test_rows_with_nothing_left_are_told_from_those_with_one_token() -> None:
    every = frozenset(range(len(LOGITS)))
    draws = [draw(1), draw(1, masked=every), draw(1, masked=every - {4}), draw(1, temperature=0.0, masked=every)]
    drawn = sample(LOGITS.expand(4, -1), draws)
    assert drawn.nothing_left is not None
    assert drawn.nothing_left.tolist() == [False, True, False, True]
    assert drawn.tokens[2] == 4
    assert sample(LOGITS.expand(2, -1), [draw(1), draw(1, temperature=0.0)]).nothing_left is None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_makes_a_logit_infinite_leaves_nothing(temperature: float) -> None:
    large = draw(1, temperature=temperature, repetition_penalty=1e-6, history=np.array([1]), num_prompt=1)
    drawn = sample(torch.tensor([[0.0, 1e35, 1.0]]), [large])
    assert drawn.nothing_left is not None
    assert drawn.nothing_left.tolist() == [True]

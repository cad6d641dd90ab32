"""The race: known answers of its noise, its distribution, its compiled form, and how little rounding moves a draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from worker.cpu.race import compile_cpu_race
from worker.philox import philox4x32
from worker.race import Race, arrival_times, torch_race

CPU = torch.device("cpu")
VOCAB_SIZE = 49_152
GOLDEN_STEP = 0x9E3779B97F4A7C15


@pytest.fixture(scope="module")
def cpu_race() -> Race:
    return compile_cpu_race()


@pytest.fixture(params=["compiled", "torch"])
def race(request: pytest.FixtureRequest, cpu_race: Race) -> Race:
    return cpu_race if request.param == "compiled" else torch_race


def flat_rows(num_rows: int, vocab_size: int = VOCAB_SIZE, deviation: float = 2.5, seed: int = 0) -> Tensor:
    return deviation * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def check_frequencies(winners: Tensor, chances: Sequence[float]) -> None:
    """Each count within 4.5 deviations, and all together by chi-square within 3."""
    num_draws = len(winners)
    expected = num_draws * torch.tensor(chances, dtype=torch.float64)
    counts = torch.bincount(winners, minlength=len(chances)).double()
    assert (counts[expected == 0] == 0).all()
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert ((counts - expected).abs() < 4.5 * (expected * (1 - expected / num_draws)).sqrt()).all()
    freedom = len(expected) - 1
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - freedom) < 3 * math.sqrt(2 * freedom)


def test_philox_gives_the_known_answers_of_its_authors() -> None:
    zero, ones = torch.tensor(0), torch.tensor(0xFFFFFFFF)
    words = philox4x32((zero, zero, zero, zero), (zero, zero))
    assert [f"{int(word):08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    words = philox4x32((ones, ones, ones, ones), (ones, ones))
    assert [f"{int(word):08x}" for word in words] == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]
    pi = [torch.tensor(word) for word in (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)]
    words = philox4x32((pi[0], pi[1], pi[2], pi[3]), (pi[4], pi[5]))
    assert [f"{int(word):08x}" for word in words] == ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"]


def test_times_are_exponential_in_the_words_of_seed_position_and_token() -> None:
    times = arrival_times([0], [0], 6, CPU)[0]
    words = np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8])
    assert times[:4].tolist() == pytest.approx((-np.log1p(-(words + 0.5) / 2**32)).tolist(), rel=1e-14)
    seeds, positions = [0, 0, 1, 2**64 - 1, 2**32], [0, 1, 0, 5, 0]
    together = arrival_times(seeds, positions, 6, CPU)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(together[row], arrival_times([seed], [position], 1001, CPU)[0, :6])
    assert together.unique().numel() == together.numel()


def test_times_have_the_mean_and_the_spread_of_an_exponential() -> None:
    times = arrival_times([7], [3], 100_000, CPU)
    assert abs(float(times.mean()) - 1) < 0.01
    assert abs(float(times.std()) - 1) < 0.02


def test_twenty_thousand_draws_have_the_frequencies_of_the_distribution(race: Race) -> None:
    weights = [0.0, 3.0, 1e-30, 5.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5]
    total = sum(weights)
    chances = [weight / total if weight > 1e-20 else 0.0 for weight in weights]
    rows = torch.tensor(weights).expand(20_000, -1).contiguous()
    check_frequencies(race(rows, [11] * 20_000, list(range(20_000))), chances)


def test_the_sequences_of_one_request_draw_independently(race: Race) -> None:
    num_draws, chances = 20_000, [0.5, 0.3, 0.2]
    rows = torch.tensor(chances).expand(num_draws, -1).contiguous()
    seeds = [(42 + index * GOLDEN_STEP) % 2**64 for index in range(num_draws)]
    winners = race(rows, seeds, [17] * num_draws)
    check_frequencies(winners, chances)
    pairs = 3 * winners[0::2] + winners[1::2]
    check_frequencies(pairs, [first * second for first in chances for second in chances])


@pytest.mark.parametrize("vocab_size", [1, 3, 255, 256, 257, 1001, VOCAB_SIZE])
def test_the_compiled_race_has_the_winners_of_the_plain_one(cpu_race: Race, vocab_size: int) -> None:
    seeds = [index * GOLDEN_STEP % 2**64 for index in range(24)]
    positions = [0, 1, 2**31 - 1, *range(100, 121)]
    for deviation in (0.0, 2.5, 8.0):
        rows = flat_rows(24, vocab_size, deviation).softmax(-1)
        rows[::3] *= torch.rand(8, vocab_size, generator=torch.Generator().manual_seed(1)) < 0.01
        assert torch.equal(cpu_race(rows, seeds, positions), torch_race(rows, seeds, positions))


def test_a_row_has_the_same_winner_alone_and_among_others(race: Race) -> None:
    rows = flat_rows(8, 5000).softmax(-1)
    seeds, positions = list(range(8)), list(range(50, 58))
    together = race(rows, seeds, positions).tolist()
    assert together == [int(race(rows[i : i + 1], seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(8)]
    # Other noise gives other winners, or the comparison above could not fail.
    assert together != race(rows, seeds, [position + 1 for position in positions]).tolist()


def test_a_lone_token_wins_and_an_empty_row_gives_0(race: Race) -> None:
    rows = torch.zeros(3, 1000)
    rows[0, 777], rows[1, 999] = 1e-38, 0.25
    assert race(rows, [1, 2, 3], [4, 5, 6]).tolist() == [777, 999, 0]


def test_the_scale_of_a_row_does_not_matter(race: Race) -> None:
    rows = flat_rows(16, 1000).softmax(-1)
    seeds, positions = list(range(16)), [9] * 16
    assert torch.equal(race(rows, seeds, positions), race(rows * 2.0**-20, seeds, positions))


def rounded(logits: Tensor, seed: int) -> Tensor:
    """The logits of another batch shape: each off by some 1e-6 of itself."""
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
    return logits * (1 + 1e-6 * noise)


def by_inverse(chances: Tensor, coins: Tensor) -> Tensor:
    """The rule that was not taken: one coin a draw, and the inverse of the cumulative distribution."""
    cumulative = chances.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, coins * cumulative[-1], right=True)


def test_rounding_of_a_whole_vocabulary_flips_at_most_one_draw_in_twenty_thousand(cpu_race: Race) -> None:
    """None of them flips. By the inverse of the cumulative distribution 146 of as many do: one in 137."""
    num_flips = num_flips_by_inverse = 0
    for number, row in enumerate(flat_rows(20)):
        chances, others = row.softmax(-1), rounded(row, number).softmax(-1)
        rows, other_rows = chances.repeat(250, 1), others.repeat(250, 1)
        seeds = [number * GOLDEN_STEP % 2**64] * 250
        for first in range(0, 1000, 250):
            positions = list(range(first, first + 250))
            winners = cpu_race(rows, seeds, positions)
            num_flips += int((winners != cpu_race(other_rows, seeds, positions)).sum())
        coins = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        num_flips_by_inverse += int((by_inverse(chances, coins) != by_inverse(others, coins)).sum())
    assert num_flips <= 1
    assert num_flips_by_inverse > 100

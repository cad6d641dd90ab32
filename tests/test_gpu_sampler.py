"""The GPU sampler against a float64 oracle that sorts, and against the CPU sampler.

Runs on a GPU, or without one in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_sampler.py
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="triton is not installed")

import triton.language as tl  # noqa: E402

from planner.request import SamplingParams  # noqa: E402
from worker.cuda import race as gpu_race  # noqa: E402
from worker.cuda.sampler import GpuSampler  # noqa: E402
from worker.race import arrival_times  # noqa: E402
from worker.sampler import Draw, sample  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
VOCAB_SIZE = 9_001 if INTERPRETED else 128_256

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="too long for the interpreter, or needs graphs")

KEY_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# A border as near as this, in shares of the row's mass, may fall on either side in float32.
TOLERANCE = 1e-6
# Of two tokens that arrive as near to each other as this, relatively, either may win in float32.
TIE = 1e-5
SETTINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=50, top_p=0.5),
    SamplingParams(min_p=0.05),
    SamplingParams(min_p=0.05, top_k=7),
    SamplingParams(min_p=0.02, top_p=0.6),
    SamplingParams(min_p=0.01, top_k=20, top_p=0.6),
    SamplingParams(top_p=0.0),
    SamplingParams(top_k=1),
    SamplingParams(temperature=3.0, top_k=300, top_p=0.99),
    SamplingParams(top_k=2**31 - 1),
    SamplingParams(temperature=0.01, top_p=0.5),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=100.0, top_p=0.999),
)


class Tables(NamedTuple):
    """Settings by slot, as the sampler reads them."""

    row_slots: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    length: Tensor


def make_tables(settings: list[SamplingParams], positions: list[int]) -> Tables:
    """Row r has settings[r] in a shuffled slot and draws for positions[r]."""
    num_rows = len(settings)
    slots = np.random.default_rng(0).permutation(num_rows + 3)[:num_rows]

    def by_slot(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        column = torch.zeros(num_rows + 3, dtype=dtype)
        column[torch.from_numpy(slots)] = torch.tensor(values, dtype=dtype)
        return column.to(DEVICE)

    signed = [s.seed - 2**64 if s.seed >= 2**63 else s.seed for s in settings]
    return Tables(
        row_slots=torch.from_numpy(slots.astype(np.int32)).to(DEVICE),
        temperature=by_slot([s.temperature for s in settings], torch.float32),
        top_k=by_slot([s.top_k for s in settings], torch.int32),
        top_p=by_slot([s.top_p for s in settings], torch.float32),
        min_p=by_slot([s.min_p for s in settings], torch.float32),
        seed=by_slot(signed, torch.int64),
        length=by_slot([position - 1 for position in positions], torch.int32),
    )


class Drawn(NamedTuple):
    tokens: Tensor
    bad_rows: Tensor
    cut: Tensor


def run(logits: Tensor, settings: list[SamplingParams], positions: list[int]) -> Drawn:
    sampler = GpuSampler(len(logits), logits.shape[1], DEVICE)
    tokens = torch.full((len(logits),), -7, dtype=torch.int32, device=DEVICE)
    bad_rows = torch.full_like(tokens, -7)
    sampler.cut.fill_(-7)
    sampler.sample(logits, *make_tables(settings, positions), tokens, bad_rows)
    return Drawn(tokens.cpu(), bad_rows.cpu(), sampler.cut.cpu())


class Oracle(NamedTuple):
    kept: Tensor  # bool[vocab]
    token: int
    lead: float  # of the winner before the second, as a share of its score
    border: float  # of top-p and min-p from the nearest place where they would cut otherwise


def oracle(logits: Tensor, settings: SamplingParams, position: int) -> Oracle:
    """Sorts one row in float64."""
    x = logits.cpu().double()
    as_float32 = {n: float(np.float32(getattr(settings, n))) for n in ("temperature", "top_p", "min_p")}
    p = torch.softmax((x - x.max()) / as_float32["temperature"], dim=-1)
    order = torch.sort(x, descending=True, stable=True).indices
    floor = as_float32["min_p"] * p.max()
    border = float(((p - floor).abs() / p.max()).min()) if 0 < settings.min_p < 1 else 1.0
    kept = order[(p >= floor)[order] & (x > -torch.inf)[order]]
    if settings.top_k:
        kept = kept[: settings.top_k]
    if settings.top_p < 1:
        share = p[kept] / p[kept].sum()
        before = share.cumsum(0) - share
        border = min(border, float((before - as_float32["top_p"]).abs().min()) if settings.top_p > 0 else 1.0)
        kept = kept[before <= as_float32["top_p"]]
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[kept] = True
    times = arrival_times([settings.seed], [position], len(x), torch.device("cpu"))[0]
    scores = torch.where(mask, p, 0.0) / times
    first, second = scores.topk(2).values.tolist()
    return Oracle(mask, int(scores.argmax()), 1 - second / first, border)


def keys(logits: Tensor) -> Tensor:
    x = logits.cpu().float()
    bits = torch.where(x == 0, 0.0, x).view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> KEY_SHIFTS[logits.dtype]


def kept_by(logits: Tensor, cut: Tensor) -> Tensor:
    """The kept set that a filtered row's cut stands for."""
    key, token = keys(logits), torch.arange(len(logits))
    return (key > cut[0]) | ((key == cut[0]) & (token <= cut[1]))


def make_logits(num_rows: int, kind: str, dtype: torch.dtype, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """flat: normal, deviation 2.5; peaked: a Zipf law of exponent 1.5 in random order; tied: eight values."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, vocab_size)
    if kind == "flat":
        logits = 2.5 * torch.randn(shape, generator=generator)
    elif kind == "tied":
        logits = torch.randint(0, 8, shape, generator=generator) / 2
    else:
        ranks = torch.stack([torch.randperm(vocab_size, generator=generator) + 1 for _ in range(num_rows)])
        logits = -1.5 * ranks.float().log() + 10
    return logits.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["flat", "peaked", "tied"])
def test_rows_of_all_kinds_keep_and_draw_what_the_oracle_does(kind: str, dtype: torch.dtype) -> None:
    settings = [replace(s, seed=(r * 0x9E3779B97F4A7C15) % 2**64) for r, s in enumerate(SETTINGS)]
    positions = [5 * r + 1 for r in range(len(settings))]
    logits = make_logits(len(settings), kind, dtype)
    drawn = run(logits, settings, positions)
    cpu = sample(logits.cpu().float(), [Draw(s, p) for s, p in zip(settings, positions, strict=True)]).tokens
    assert not drawn.bad_rows.any()
    for row, (params, position) in enumerate(zip(settings, positions, strict=True)):
        if params.greedy:
            assert drawn.tokens[row] == cpu[row]
            continue
        expected = oracle(logits[row], params, position)
        filtered = 0 < params.top_k < logits.shape[1] or params.top_p < 1 or params.min_p > 0
        if expected.border < TOLERANCE:
            continue
        if filtered:
            different = kept_by(logits[row], drawn.cut[row]) != expected.kept
            assert not different.any(), (row, params, different.sum())
        assert expected.kept[drawn.tokens[row]]
        if expected.lead > TIE:
            assert drawn.tokens[row] == expected.token == cpu[row], (row, params)


def test_few_rows_are_too_near_a_border_to_check() -> None:
    logits = make_logits(len(SETTINGS), "peaked", torch.float32)
    checked = [oracle(x, s, 1).border >= TOLERANCE for x, s in zip(logits, SETTINGS, strict=True) if not s.greedy]
    assert sum(checked) >= len(checked) - 2


def test_the_oracle_sees_a_token_too_many() -> None:
    logits = make_logits(1, "tied", torch.float32)
    cut = run(logits, [SamplingParams(top_k=5)], [1]).cut[0]
    expected = oracle(logits[0], SamplingParams(top_k=5), 1)
    assert (kept_by(logits[0], cut) == expected.kept).all()
    assert (kept_by(logits[0], cut + torch.tensor([0, VOCAB_SIZE // 2])) != expected.kept).any()


def test_a_row_draws_the_same_alone_and_among_others() -> None:
    settings = [replace(s, seed=r) for r, s in enumerate(SETTINGS)]
    logits = make_logits(len(settings), "peaked", torch.float16)
    together = run(logits, settings, [9] * len(settings)).tokens
    for row in range(0, len(settings), 3):
        assert run(logits[row : row + 1], settings[row : row + 1], [9]).tokens == together[row]


def test_a_row_with_nan_or_infinity_is_marked_and_harms_no_other() -> None:
    settings = [SETTINGS[r % 5] for r in range(10)]
    logits = make_logits(10, "flat", torch.float32)
    clean = run(logits, settings, [1] * 10)
    logits[1, 77] = torch.nan
    logits[3, VOCAB_SIZE - 1] = torch.inf
    logits[5, 4000] = torch.nan
    logits[7] = -torch.inf
    drawn = run(logits, settings, [1] * 10)
    bad = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 0, 0])
    assert torch.equal(drawn.bad_rows, bad.int())
    assert (drawn.tokens[bad == 1] == 0).all()
    assert torch.equal(drawn.tokens[bad == 0], clean.tokens[bad == 0])


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((len(SETTINGS), VOCAB_SIZE), -torch.inf, device=DEVICE)
    logits[:, 4242] = -3.0
    assert (run(logits, list(SETTINGS), [1] * len(SETTINGS)).tokens == 4242).all()


def test_the_largest_logit_wins_at_temperature_0_and_the_lowest_id_on_ties() -> None:
    logits = make_logits(3, "flat", torch.bfloat16)
    logits[0, [6000, 130, 131]] = 60.0
    logits[1, [0, VOCAB_SIZE - 1]] = 60.0
    logits[2] = -0.0
    logits[2, 1] = 0.0
    assert run(logits, [SETTINGS[0]] * 3, [1] * 3).tokens.tolist() == [130, 0, 0]


def test_plain_rows_draw_what_the_cpu_draws() -> None:
    num_rows = 48
    logits = make_logits(num_rows, "flat", torch.float32, seed=3)
    settings = [SamplingParams(temperature=0.5 + row / num_rows, seed=row * 2**58) for row in range(num_rows)]
    positions = [row * 10_007 + 1 for row in range(num_rows)]
    cpu = sample(logits.cpu(), [Draw(s, p) for s, p in zip(settings, positions, strict=True)]).tokens
    assert torch.equal(run(logits, settings, positions).tokens, cpu.int())


@triton.jit
def write_times(seeds, positions, out):  # type: ignore[no-untyped-def]
    i = tl.program_id(0)
    group = i * 2 + tl.arange(0, 2)
    token = group[:, None] * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + token, gpu_race.times_of(group, tl.load(seeds + i), tl.load(positions + i)))


def test_arrival_times_are_those_of_the_rule() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    positions = [0, 1, 2, 100_000, 2**31 - 1, 7]
    out = torch.empty(len(seeds), 128, device=DEVICE)
    signed = torch.tensor([s - 2**64 if s >= 2**63 else s for s in seeds], device=DEVICE)
    write_times[(len(seeds),)](signed, torch.tensor(positions, dtype=torch.int32, device=DEVICE), out)
    rule = arrival_times(seeds, positions, 128 * len(seeds), torch.device("cpu"))
    expected = torch.stack([rule[i, 128 * i : 128 * i + 128] for i in range(len(seeds))])
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-6, atol=0.0)


@triton.jit
def write_exponential(words, out):  # type: ignore[no-untyped-def]
    i = tl.arange(0, 16)
    tl.store(out + i, gpu_race._exponential(tl.load(words + i).to(tl.uint32)))


def test_the_earliest_and_the_latest_times_are_as_exact_as_the_others() -> None:
    words = [0, 1, 2, 255, 2**16, 2**24 + 1, 2**29 - 1, 2**29, 2**29 + 512, 2**30, 2**31 - 1, 2**31, 2**32 - 2**16]
    words += [2**32 - 256, 2**32 - 2, 2**32 - 1]
    out = torch.empty(16, device=DEVICE)
    write_exponential[(1,)](torch.tensor(words, dtype=torch.int64, device=DEVICE), out)
    expected = -torch.log1p(-(torch.tensor(words, dtype=torch.float64) + 0.5) * 2.0**-32)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-6, atol=0.0)


@needs_gpu
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=8, top_p=0.95)], ids=["plain", "filtered"])
def test_twenty_thousand_draws_have_the_frequencies_of_the_distribution(params: SamplingParams) -> None:
    num_draws = 20_000
    row = make_logits(1, "flat", torch.float32, vocab_size=50)
    tokens = run(row.expand(num_draws, 50).contiguous(), [replace(params, seed=11)] * num_draws, list(range(num_draws)))
    p = torch.softmax(row[0].cpu().double(), dim=-1)
    p = torch.where(oracle(row[0], params, 1).kept, p, 0.0)
    p /= p.sum()
    counts = torch.bincount(tokens.tokens.long(), minlength=50).double()
    deviation = (num_draws * p * (1 - p)).sqrt()
    assert ((counts - num_draws * p).abs() <= 4.5 * deviation).all()


@needs_gpu
def test_a_captured_draw_follows_the_tables_and_the_logits_at_replay() -> None:
    settings = [replace(s, seed=r) for r, s in enumerate(SETTINGS)]
    logits = make_logits(len(settings), "peaked", torch.bfloat16)
    tables = make_tables(settings, [4] * len(settings))
    sampler = GpuSampler(len(settings), VOCAB_SIZE, DEVICE)
    tokens = torch.empty(len(settings), dtype=torch.int32, device=DEVICE)
    bad_rows = torch.empty_like(tokens)
    sampler.sample(logits, *tables, tokens, bad_rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.sample(logits, *tables, tokens, bad_rows)
    for seed in range(3):
        shifted = settings[seed:] + settings[:seed]
        logits.copy_(make_logits(len(settings), "flat", torch.bfloat16, seed=seed))
        for fixed, new in zip(tables, make_tables(shifted, [seed + 1] * len(settings)), strict=True):
            fixed.copy_(new)
        graph.replay()
        assert torch.equal(tokens.cpu(), run(logits, shifted, [seed + 1] * len(settings)).tokens)

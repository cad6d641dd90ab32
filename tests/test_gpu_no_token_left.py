"""Rows that may draw nothing at all, on the CUDA executor and in a program's draws: each ends with one error that says
why, and alone. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.errors import ForwardFailed, GrammarFailed, NoTokenLeft  # noqa: E402
from planner.request import FinishReason, Request, SamplingParams, Update  # noqa: E402
from tests.cuda_rig import DEVICE, Model, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from tests.ladder_masks import LadderMasks, climbs  # noqa: E402
from tests.turns import tokens_of  # noqa: E402
from worker.cuda.row_draws import RowDraws  # noqa: E402
from worker.masks import BitMask, ConstrainedRow  # noqa: E402
from worker.sampler import Draw  # noqa: E402

VOCAB_SIZE = 203
NUM_TOKENS = 4
GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=1.3, seed=4)
FILTERED = SamplingParams(temperature=0.8, seed=5, top_k=7, top_p=0.9)
EVERY_TOKEN = tuple((token,) for token in range(VOCAB_SIZE))
EVERY_STOP = frozenset(range(VOCAB_SIZE))


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def request(length: int, sampling: SamplingParams, **options: Any) -> Request:
    prompt = np.random.default_rng(length).integers(0, VOCAB_SIZE, size=length)
    return Request(prompt, NUM_TOKENS, sampling, **options)


def the_end(updates: list[Update], index: int = 0) -> Update:
    (end,) = [update for update in updates if update.index == index and update.finish_reason is not None]
    return end


def test_a_row_that_may_draw_nothing_ends_alone_and_as_on_the_cpu(model: Model) -> None:
    mates = [request(9, GREEDY), request(5, HOT)]
    barred = [
        request(7, replace(sampling, bad_words=EVERY_TOKEN)) if by_words else
        request(7, sampling, min_tokens=3, stop_token_ids=EVERY_STOP)
        for sampling, by_words in ((GREEDY, True), (HOT, False), (replace(FILTERED, logprobs=3), True))
    ]  # fmt: skip
    rigs = Rig(torch_executor(model)), Rig(cuda_executor(model), depth=2)
    expected, found = (rig.updates([*barred, *mates]) for rig in rigs)
    for news in (expected, found):
        for updates, param in zip(news, ("bad_words", "min_tokens", "bad_words"), strict=False):
            error = the_end(updates).error
            assert isinstance(error, NoTokenLeft), (error, tokens_of(updates))
            assert error.param == param
            assert tokens_of(updates) == []
        assert [tokens_of(updates) for updates in news[3:]] == [tokens_of(updates) for updates in expected[3:]]
        assert all(the_end(updates).finish_reason is FinishReason.LENGTH for updates in news[3:])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_dead_end_in_the_midst_of_an_answer_is_told_there(model: Model, depth: int) -> None:
    """A grammar whose third token is always a bad word, for each sequence of a request."""
    words = tuple((token,) for token in range(VOCAB_SIZE) if token % 7 == 2)
    requests = [
        request(7, replace(GREEDY, grammar="7", bad_words=words)),
        request(5, replace(HOT, grammar="7", bad_words=words, logprobs=2), n=2),
        request(6, replace(FILTERED, grammar="5")),
    ]
    rig = Rig(cuda_executor(model, grammars=LadderMasks(VOCAB_SIZE)), depth=depth)
    greedy, hot, fine = rig.updates(requests)
    for updates, index in ((greedy, 0), (hot, 0), (hot, 1)):
        end = the_end(updates, index)
        assert isinstance(end.error, NoTokenLeft), (end, tokens_of(updates, index))
        assert len(tokens_of(updates, index)) == 2
        assert climbs(tokens_of(updates, index), 7)
    assert the_end(fine).finish_reason is FinishReason.LENGTH
    assert climbs(tokens_of(fine), 5)


class EndingMasks(LadderMasks):
    """From the third token of a sequence on, nothing may follow."""

    def masks(self, rows: Sequence[ConstrainedRow]) -> list[BitMask | GrammarFailed]:
        nothing = np.zeros(-(-VOCAB_SIZE // 8), dtype=np.uint8)
        found = super().masks(rows)
        return [nothing if len(row.generated) >= 2 else mask for row, mask in zip(rows, found, strict=True)]


def test_an_empty_mask_ends_a_row_that_ran_ahead_of_it(model: Model) -> None:
    rig = Rig(cuda_executor(model, grammars=EndingMasks(VOCAB_SIZE)), depth=2)
    broken, fine = rig.updates([request(7, replace(GREEDY, grammar="7")), request(5, HOT)])
    assert any(chunk.tokens is None and chunk.sampling.grammar for step in rig.steps for chunk in step.chunks)
    error = the_end(broken).error
    assert isinstance(error, NoTokenLeft), error
    assert "the grammar had a say" in error.message
    assert climbs(tokens_of(broken), 7)
    assert len(tokens_of(broken)) == 2
    assert the_end(fine).finish_reason is FinishReason.LENGTH


def test_a_row_that_is_not_finite_is_told_as_such_also_where_nothing_may_be_drawn(model: Model) -> None:
    rig = Rig(cuda_executor(model))
    head = model.decoder.weights.head
    kept = head.clone()
    try:
        head.fill_(float("nan"))
        barred, plain = rig.updates([request(7, replace(HOT, bad_words=EVERY_TOKEN)), request(5, GREEDY)])
    finally:
        head.copy_(kept)
    for updates in (barred, plain):
        assert isinstance(the_end(updates).error, ForwardFailed)


@pytest.mark.parametrize("at_once", [2, 8])
def test_a_programs_draws_say_which_rows_have_nothing_left(at_once: int) -> None:
    logits = torch.randn(5, 9001, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    every = frozenset(range(9001))
    for settings in ([GREEDY] * 5, [GREEDY, HOT, FILTERED, HOT, GREEDY]):
        draws = [Draw(one, 10 + row) for row, one in enumerate(settings)]
        row_draws = RowDraws(at_once, 9001, DEVICE)
        free = row_draws(logits, draws)
        assert free.nothing_left is None, "rows that change nothing pay for nothing"
        draws[1], draws[3] = (replace(draws[row], masked=every) for row in (1, 3))
        draws[4] = replace(draws[4], masked=frozenset({3}))
        drawn = row_draws(logits, draws)
        assert drawn.nothing_left is not None
        assert drawn.nothing_left.tolist() == [False, True, False, True, False]
        assert drawn.tokens[[0, 2]].tolist() == free.tokens[[0, 2]].tolist()

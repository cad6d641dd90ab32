"""Tokens that a grammar leaves no choice in, on the CUDA executor with one and two steps in flight: they are told and
fed at once, and answers are those that are drawn token by token. Runs on a GPU, or in Triton's interpreter
(TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.errors import GrammarFailed, RequestFailed  # noqa: E402
from planner.request import FinishReason, Request, SamplingParams  # noqa: E402
from tests.cuda_rig import FullDecode, Model, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from tests.grammar_rig import EOS, TEXT, OneByOne, schema_grammar  # noqa: E402
from tests.ladder_masks import ForcingMasks, climbs  # noqa: E402
from tests.random_schemas import random_schema  # noqa: E402
from tests.turns import tokens_of  # noqa: E402
from worker.grammars import Grammars  # noqa: E402

NUM_TOKENS = 11 if INTERPRETED else 40
HOT: dict[str, Any] = {"temperature": 1.2, "seed": 9}


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def masks(model: Model, pattern: str = "..####", **options: Any) -> ForcingMasks:
    return ForcingMasks(model.decoder.config.vocab_size, pattern, **options)


def request(length: int, modulus: int | None, **options: Any) -> Request:
    sampling: dict[str, Any] = {"temperature": 0.0, **options.pop("sampling", {})}
    grammar = None if modulus is None else str(modulus)
    prompt = np.random.default_rng(length).integers(0, 200, size=length)
    return Request(
        prompt, options.pop("max_tokens", NUM_TOKENS), SamplingParams(grammar=grammar, **sampling), **options
    )


def shapes(rig: Rig[Any]) -> list[tuple[int, int]]:
    return [(chunk.start, chunk.length) for step in rig.steps for chunk in step.chunks]


def drawn_one_by_one(model: Model, requests: list[Request], pattern: str = "..####") -> list[list[list[int]]]:
    return Rig(torch_executor(model, grammars=masks(model, pattern, tells=False))).answer(requests)


@pytest.mark.parametrize(("depth", "captured"), [(1, ()), (2, ()), (2, (16, 32, 64))])
def test_answers_are_those_that_are_drawn_one_by_one(model: Model, depth: int, captured: tuple[int, ...]) -> None:
    requests = [
        request(5, 7),
        request(9, None),
        request(17, 3, sampling=HOT, n=2),
        request(4, 5, sampling={"repetition_penalty": 1.3}),
        request(6, None, sampling=HOT),
        request(3, 5, sampling=HOT, min_tokens=4, stop_token_ids=frozenset({200})),
    ]
    rig = Rig(cuda_executor(model, grammars=masks(model), captured_widths=captured), depth=depth)
    assert rig.answer(requests) == drawn_one_by_one(model, requests)
    assert rig.planner.metrics.num_tokens_forced > 15
    fed_at_once = [chunk for step in rig.steps for chunk in step.chunks if chunk.length > 1 and chunk.start >= 3]
    assert any(chunk.start + chunk.length > 20 for chunk in fed_at_once), "the sequences that forked"


def test_a_run_is_told_with_the_token_before_it_and_costs_one_step_more_than_its_feeding(model: Model) -> None:
    asked = request(4, 7, max_tokens=13)
    rig = Rig(cuda_executor(model, grammars=masks(model)), depth=2)
    (updates,) = rig.updates([asked])
    assert [len(update.tokens) for update in updates] == [1, 5, 1, 5, 1]
    tokens = tokens_of(updates)
    assert climbs(tokens, 7)
    assert [[tokens]] == drawn_one_by_one(model, [asked])
    assert shapes(rig) == [(0, 4), (4, 1), (5, 1), (6, 4), (10, 1), (11, 1), (12, 4)]


def test_a_run_that_begins_an_answer_is_told_by_the_prompts_own_step(model: Model) -> None:
    asked = request(4, 7, max_tokens=6)
    rig = Rig(cuda_executor(model, grammars=masks(model, "####..")), depth=2)
    (updates,) = rig.updates([asked])
    assert [len(update.tokens) for update in updates] == [4, 1, 1]
    assert [[tokens_of(updates)]] == drawn_one_by_one(model, [asked], "####..")
    assert shapes(rig) == [(0, 4), (4, 1), (5, 3), (8, 1)]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_run_of_one_token_costs_no_step(model: Model, depth: int) -> None:
    asked = request(4, 7, sampling=HOT)
    rig = Rig(cuda_executor(model, grammars=masks(model, ".#")), depth=depth)
    assert rig.answer([asked]) == drawn_one_by_one(model, [asked], ".#")
    assert {length for _, length in shapes(rig)[1:]} == {1}
    assert len(rig.steps) == NUM_TOKENS


@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_ends_within_a_run(model: Model, depth: int) -> None:
    stopped = request(5, 7, stop_token_ids=frozenset({4}))
    budget = request(9, 5, max_tokens=4, sampling=HOT)
    plain = request(6, None)
    rig = Rig(cuda_executor(model, grammars=masks(model)), depth=depth)
    answers = rig.updates([stopped, budget, plain])
    assert [news[-1].finish_reason for news in answers] == [FinishReason.STOP, *[FinishReason.LENGTH] * 2]
    tokens = [[tokens_of(news)] for news in answers]
    assert tokens == drawn_one_by_one(model, [stopped, budget, plain])
    assert [len(answer) for (answer,) in tokens] == [5, 4, NUM_TOKENS]
    assert rig.planner.metrics.num_tokens_forced == (2 + 1 if depth == 1 else 3 + 2)


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"bad_words": ((201, 202),)}], ids=lambda each: next(iter(each)))
def test_where_each_token_wants_a_draw_nothing_is_asked(model: Model, sampling: dict[str, Any]) -> None:
    grammars = masks(model)
    asked = request(5, 7, max_tokens=5, sampling=sampling)
    rig = Rig(cuda_executor(model, grammars=grammars), depth=2)
    (updates,) = rig.updates([asked])
    assert [[tokens_of(updates)]] == drawn_one_by_one(model, [asked])
    assert [len(update.tokens) for update in updates] == [1] * 5
    assert grammars.asked == []


def test_sequences_that_lose_their_cells_draw_the_same(model: Model) -> None:
    requests = [request(length, modulus, sampling=HOT) for length, modulus in ((5, 7), (9, 5), (4, 3))]
    rig = Rig(cuda_executor(model, num_cells=18 + 2 * NUM_TOKENS, grammars=masks(model)), depth=2)
    assert rig.answer(requests) == drawn_one_by_one(model, requests)
    assert rig.planner.metrics.num_preemptions > 0
    assert rig.planner.metrics.num_tokens_forced > 5


def test_a_request_that_is_cancelled_within_a_run_leaves_the_others_as_they_are(model: Model) -> None:
    gone, stays = request(5, 7), request(9, 5, sampling=HOT)
    rig = Rig(cuda_executor(model, grammars=masks(model)), depth=2)
    ids = [rig.planner.submit(each) for each in (gone, stays)]
    told: list[int] = []
    while rig.planner.has_work:
        for update in rig.turn():
            if update.request_id == ids[1]:
                told += update.tokens
            elif len(update.tokens) > 1:
                rig.planner.cancel(ids[0])
    assert [[told]] == drawn_one_by_one(model, [stays])


@pytest.mark.parametrize("failing", [4, 6])
def test_a_draw_that_fails_about_a_run_ends_its_sequence_and_tells_nothing_wrong(model: Model, failing: int) -> None:
    """A forward of several tokens has two draws, the first of all its rows: 1 and 2 are the prompts', 4 is of what is
    forced already, and 6 of what follows the run."""
    requests = [request(5, 7, sampling=HOT), request(9, None)]
    expected = drawn_one_by_one(model, requests)
    around: Any = lambda decode: FullDecode(decode, "draw", failing)  # noqa: E731
    rig = Rig(cuda_executor(model, grammars=masks(model), around_decode=around), depth=2)
    broken, fine = rig.updates(requests)
    assert isinstance(broken[-1].error, RequestFailed)
    told = tokens_of(broken)
    assert 1 < len(told) < NUM_TOKENS
    assert told == expected[0][0][: len(told)]
    assert tokens_of(fine) == expected[1][0]
    assert rig.answer(requests) == expected


def test_a_grammar_that_cannot_go_on_behind_a_run_ends_its_sequence_there(model: Model) -> None:
    rig = Rig(cuda_executor(model, grammars=masks(model, fails_after=6)), depth=2)
    broken, fine = rig.updates([request(5, 7), request(9, None)])
    assert isinstance(broken[-1].error, GrammarFailed)
    assert sum(len(update.tokens) for update in broken) == 6
    assert fine[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("first", [0, 4])
def test_answers_to_random_schemas_are_those_that_are_drawn_one_by_one(first: int) -> None:
    wide = tiny_model(vocab_size=272)
    schemas = [{"enum": ["red or blue", "red and blue"]}, *(random_schema(first + i) for i in range(3))]
    prompt = np.array(TEXT.encode("hello"), dtype=np.int64)
    requests = [
        Request(
            prompt, 30, SamplingParams(1.0, seed=i, grammar=schema_grammar(schema)), stop_token_ids=frozenset({EOS})
        )
        for i, schema in enumerate(schemas)
    ]
    drawn = Rig(torch_executor(wide, grammars=OneByOne(TEXT.vocabulary))).answer(requests)
    rig = Rig(cuda_executor(wide, grammars=Grammars(TEXT.vocabulary)), depth=2)
    assert rig.answer(requests) == drawn
    assert rig.planner.metrics.num_tokens_forced > 20

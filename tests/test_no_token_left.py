"""Rows that may draw nothing at all, on the torch executor: each ends with one error that says why, and alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import outcome, retry_after_s
from planner.errors import NoTokenLeft, error_from_code
from planner.request import FinishReason, Request, SamplingParams, Update
from planner.step import Chunk
from tests.ladder_masks import LadderMasks, climbs
from tests.tiny_models import save_tiny_model
from tests.torch_rig import GREEDY, Rig, chunk, load, request
from tests.turns import tokens_of
from worker.dead_ends import no_token_left
from worker.forwards import EagerForwards
from worker.kv_pool import KvPool
from worker.program import Program
from worker.torch_executor import TorchExecutor

VOCAB_SIZE = 97
PROMPT = (5, 17, 3, 80, 41)
EVERY_TOKEN = tuple((token,) for token in range(VOCAB_SIZE))
HOT = SamplingParams(temperature=1.3, seed=4)
FILTERED = SamplingParams(temperature=0.8, seed=5, top_k=7, top_p=0.9)
LADDER = SamplingParams(grammar="7", bad_words=tuple((token,) for token in range(VOCAB_SIZE) if token % 7 == 3))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", folder)
    return load(str(folder))


@pytest.fixture
def rig(program: Program) -> Rig:
    info, decoder = program.info, program.decoder
    pool = KvPool(info.num_layers, 512, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    executor = TorchExecutor(
        replace(info, num_cells=512), EagerForwards(decoder, pool), grammars=LadderMasks(VOCAB_SIZE)
    )
    return Rig(executor)


def told(rig: Rig, *requests: Request) -> list[list[Update]]:
    """Of all requests together, each one's updates."""
    ids = [rig.planner.submit(one) for one in requests]
    updates = rig.run()
    return [[update for update in updates if update.request_id == request_id] for request_id in ids]


def the_end(updates: list[Update], index: int = 0) -> Update:
    (end,) = [update for update in updates if update.index == index and update.finish_reason is not None]
    return end


@pytest.mark.parametrize("sampling", [GREEDY, HOT, FILTERED, replace(HOT, logprobs=3)])
def test_a_row_that_may_draw_nothing_ends_alone(rig: Rig, sampling: SamplingParams) -> None:
    mates = [request(PROMPT, 6), request(PROMPT[::-1], 6, HOT, n=2)]
    alone = rig.answer(mates)
    silent = request(PROMPT, 6, replace(sampling, bad_words=EVERY_TOKEN))
    endless = request(PROMPT, 6, sampling, min_tokens=3, stop_token_ids=frozenset(range(VOCAB_SIZE)))
    first, second, *others = told(rig, silent, endless, *mates)
    for updates, param in ((first, "bad_words"), (second, "min_tokens")):
        error = the_end(updates).error
        assert isinstance(error, NoTokenLeft), error
        assert error.param == param
        assert "97" in error.message
        assert tokens_of(updates) == []
        assert not any(update.logprobs for update in updates)
    assert [[tokens_of(updates, i) for i in range(len(of))] for updates, of in zip(others, alone, strict=True)] == alone


@pytest.mark.parametrize("sampling", [replace(LADDER, temperature=0.0), LADDER, replace(LADDER, top_p=0.8, logprobs=0)])
def test_what_came_before_the_dead_end_was_told(rig: Rig, sampling: SamplingParams) -> None:
    """A grammar whose fourth token is always a bad word, for each sequence of n."""
    broken, fine = told(rig, request(PROMPT, 9, sampling, n=3), request(PROMPT, 9, SamplingParams(grammar="5")))
    for index in range(3):
        end = the_end(broken, index)
        assert isinstance(end.error, NoTokenLeft), end
        assert end.finish_reason is FinishReason.FAILED
        assert end.error.param is None
        assert len(tokens_of(broken, index)) == 3
        assert climbs(tokens_of(broken, index), 7)
    assert the_end(fine).finish_reason is FinishReason.LENGTH
    assert climbs(tokens_of(fine), 5)


def test_a_minimum_that_leaves_one_token_has_it_drawn(rig: Rig) -> None:
    stops = frozenset(range(VOCAB_SIZE)) - {42}
    (updates,) = told(rig, request(PROMPT, 4, HOT, min_tokens=3, stop_token_ids=stops))
    assert tokens_of(updates)[:3] == [42, 42, 42]
    assert the_end(updates).error is None


def refused(**options: Any) -> Chunk:
    made: Chunk = chunk([4], range(10), start=9, sampling=options.pop("sampling", GREEDY), **options)
    return made


def test_the_error_names_everything_that_had_a_say() -> None:
    both = no_token_left(refused(sampling=LADDER, masked=frozenset({1, 2})))
    assert both.message == (
        "nothing is left to draw at position 10 once the grammar, bad_words (14 of them) "
        "and min_tokens (which keeps back 2 stop tokens) had a say"
    )
    assert both.param is None
    assert no_token_left(refused(sampling=SamplingParams(grammar="7"))).message == (
        "nothing is left to draw at position 10 once the grammar had a say"
    )
    assert "penalties and biases" in no_token_left(refused()).message


def test_sending_it_again_is_not_advised() -> None:
    error = error_from_code("no_token_left", "nothing is left", "bad_words")
    assert isinstance(error, NoTokenLeft)
    said = outcome(error)
    assert (said.status, said.grpc, retry_after_s(error)) == (400, "INVALID_ARGUMENT", None)

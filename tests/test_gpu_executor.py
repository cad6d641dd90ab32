"""The CUDA executor in float32 answers as the torch executor does, whatever is batched, cut, shared, preempted, drawn
or in flight; and what fails, fails alone. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
pytestmark = pytest.mark.gpu

from planner.errors import ForwardFailed  # noqa: E402
from planner.request import FinishReason, Pooling, Request, SamplingParams, TokenLogprobs, Update  # noqa: E402
from planner.slices import Method  # noqa: E402
from tests.cuda_rig import MODELS, FullDecode, Model, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from worker.cuda.graphs import LaunchedSteps  # noqa: E402
from worker.cuda.prefill import PrefillChain  # noqa: E402
from worker.cuda.prefill_plan import PrefillPlan  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)
NUM_TOKENS = 3 if INTERPRETED else 12
LENGTHS = (1, 3, 17) if INTERPRETED else (1, 2, 3, 7, 15, 16, 17, 33, 40, 50, 64, 65, 90)


def request(
    prompt: Sequence[int], max_tokens: int = NUM_TOKENS, sampling: SamplingParams = GREEDY, **options: Any
) -> Request:
    return Request(np.array(prompt, dtype=np.int64), max_tokens, sampling, **options)


def prompts(model: Model, lengths: Sequence[int] = LENGTHS, seed: int = 5) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(0, model.decoder.config.vocab_size, size=length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_the_torch_executors(name: str, depth: int) -> None:
    model = tiny_model(name)
    requests = [request(prompt, NUM_TOKENS + index % 3) for index, prompt in enumerate(prompts(model))]
    expected = Rig(torch_executor(model)).answer(requests)
    rig = Rig(cuda_executor(model), depth=depth)
    assert rig.answer(requests) == expected
    assert any(chunk.tokens is None for step in rig.steps for chunk in step.chunks) == (depth == 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_vectors_are_the_torch_executors_beside_answers(model: Model, depth: int) -> None:
    asked = [request(prompt) for prompt in prompts(model)]
    asked += [request(prompt, 0, pooling=pooling) for prompt in prompts(model) for pooling in Pooling]

    def vectors(rig: Rig[Any]) -> list[tuple[float, ...]]:
        return [vector for news in rig.updates(asked) if (vector := news[-1].vector)]

    expected = vectors(Rig(torch_executor(model)))
    assert len(expected) == 2 * len(LENGTHS)
    found = vectors(Rig(cuda_executor(model), depth=depth, prefill_chunk_tokens=7))
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8])
def test_every_number_of_rows_gives_the_same_tokens(model: Model, width: int) -> None:
    requests = [request(prompt) for prompt in prompts(model, range(3, 3 + width))]
    expected = Rig(torch_executor(model)).answer(requests)
    assert Rig(cuda_executor(model), depth=2).answer(requests) == expected


def test_decodes_ride_with_prefills_fed_from_the_device(model: Model) -> None:
    first, second = [request(prompt, NUM_TOKENS + 6) for prompt in prompts(model, (5, 60))]
    expected = Rig(torch_executor(model)).answer_alone([first, second])
    rig = Rig(cuda_executor(model), depth=2, max_batched_tokens=24)
    ids = [rig.planner.submit(first)]
    news: list[Update] = []
    for _ in range(3):
        news += rig.turn()
    ids.append(rig.planner.submit(second))
    while rig.planner.has_work:
        news += rig.turn()
    assert any(
        len(step.chunks) == 2 and step.chunks[0].tokens is None and step.chunks[1].length > 1 for step in rig.steps
    )
    tokens = {key: [t for update in news if update.request_id == key for t in update.tokens] for key in ids}
    assert [[tokens[key]] for key in ids] == expected


def test_forks_prefix_hits_and_preemption_change_no_token(model: Model) -> None:
    shared = prompts(model, (33,))[0]
    requests = [request(shared, n=3), request([*shared[:20], 7, 8]), request(shared)]
    expected = Rig(torch_executor(model)).answer_alone(requests)
    assert Rig(cuda_executor(model), depth=2).answer(requests) == expected
    rig = Rig(cuda_executor(model, num_cells=40 + NUM_TOKENS), depth=2)
    assert rig.answer(requests) == expected
    assert rig.answer(requests) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_random_draws_are_the_torch_executors(model: Model, depth: int) -> None:
    wild = [
        SamplingParams(temperature=0.9, seed=3),
        SamplingParams(temperature=1.5, seed=2**63 + 5, top_k=7),
        SamplingParams(temperature=0.7, seed=11, top_p=0.8),
        SamplingParams(temperature=1.1, seed=2**64 - 1, min_p=0.1, top_p=0.95, top_k=20),
        GREEDY,
    ]
    requests = [
        request(prompt, NUM_TOKENS, sampling, n=2 if index == 0 else 1)
        for index, (prompt, sampling) in enumerate(zip(prompts(model, (4, 9, 21, 30, 12)), wild, strict=True))
    ]
    expected = Rig(torch_executor(model)).answer(requests)
    assert Rig(cuda_executor(model), depth=depth).answer(requests) == expected


def test_penalties_bias_and_masks_beside_plain_rows(model: Model) -> None:
    plain = Rig(torch_executor(model)).answer([request(prompts(model, (9,))[0])])[0][0]
    requests = [
        request(prompts(model, (6,))[0], NUM_TOKENS, SamplingParams(temperature=0.0, repetition_penalty=1.7)),
        request(prompts(model, (8,))[0], NUM_TOKENS, SamplingParams(temperature=0.8, seed=4, frequency_penalty=1.5)),
        request(prompts(model, (5,))[0], NUM_TOKENS, SamplingParams(temperature=0.0, logit_bias=((9, 30.0),))),
        request(prompts(model, (9,))[0], NUM_TOKENS, stop_token_ids=frozenset(plain[:1]), min_tokens=3),
        request(prompts(model, (9,))[0], NUM_TOKENS),
    ]
    expected = Rig(torch_executor(model)).answer(requests)
    assert expected[2] == [[9] * NUM_TOKENS]
    assert expected[3][0][0] != plain[0] == expected[4][0][0]
    assert Rig(cuda_executor(model), depth=2).answer(requests) == expected


def test_log_probabilities_of_answers_and_prompts(model: Model) -> None:
    scored = SamplingParams(temperature=0.0, logprobs=3)
    requests = [
        request(prompts(model, (9,))[0], NUM_TOKENS, scored, prompt_logprobs=True),
        request(prompts(model, (40,))[0], 0, scored, prompt_logprobs=True),
        request(prompts(model, (12,))[0], NUM_TOKENS, SamplingParams(seed=8, logprobs=0)),
        request(prompts(model, (2,))[0], NUM_TOKENS),
    ]
    expected = Rig(torch_executor(model)).updates(requests)
    given = Rig(cuda_executor(model), depth=2).updates(requests)
    for ours, theirs in zip(given, expected, strict=True):
        assert _tokens(ours) == _tokens(theirs)
        _assert_close([s for u in ours for s in u.logprobs], [s for u in theirs for s in u.logprobs])
        _assert_close([s for u in ours for s in u.prompt_logprobs], [s for u in theirs for s in u.prompt_logprobs])
    assert sum(len(update.logprobs) for update in given[0]) == NUM_TOKENS
    assert sum(len(update.prompt_logprobs) for update in given[1]) == 40


def test_row_that_is_not_finite_ends_only_its_own_sequence() -> None:
    model = tiny_model(seed=2)
    poison = 77
    with torch.no_grad():
        model.decoder.weights.embedding[poison] = float("nan")
    good = [[token for token in prompt if token != poison] for prompt in prompts(model, (10, 20, 30))]
    requests = [request(prompt) for prompt in good]
    expected = Rig(torch_executor(model)).answer(requests)
    rig = Rig(cuda_executor(model), depth=2)
    *others, failed = rig.updates([*requests, request([1, 2, poison, 4])])
    assert [_tokens(news) for news in others] == [answer[0] for answer in expected]
    assert isinstance(failed[-1].error, ForwardFailed)
    assert failed[-1].finish_reason is FinishReason.FAILED
    # The cells that it spoilt serve others.
    assert rig.answer(requests) == expected


class FullOnce:
    """A prefill chain whose device has no room for one forward."""

    def __init__(self, chain: PrefillChain, failing: int) -> None:
        self._chain, self._failing, self.num_forwards = chain, failing, 0

    def hidden(self, tokens: torch.Tensor, plan: PrefillPlan, rows: torch.Tensor) -> torch.Tensor:
        self.num_forwards += 1
        if self.num_forwards == self._failing:
            raise torch.OutOfMemoryError("no room for it")
        return self._chain.hidden(tokens, plan, rows)


@pytest.mark.parametrize("depth", [1, 2])
def test_forward_without_room_fails_what_it_held_and_nothing_else(model: Model, depth: int) -> None:
    requests = [request(prompt, NUM_TOKENS) for prompt in prompts(model, (30, 30, 40, 8))]
    expected = Rig(torch_executor(model)).answer_alone(requests)
    executor = cuda_executor(model, max_prefill_tokens=32, prefill=lambda chain: FullOnce(chain, 2))
    rig = Rig(executor, depth=depth)
    updates = rig.updates(requests)
    failed = [isinstance(news[-1].error, ForwardFailed) for news in updates]
    assert any(failed)
    assert not all(failed)
    for news, answer, has_failed in zip(updates, expected, failed, strict=True):
        assert has_failed or _tokens(news) == answer[0]
    assert rig.answer(requests) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_decode_without_room_fails_what_it_held_and_not_the_executor(model: Model, depth: int) -> None:
    requests = [request(prompt) for prompt in prompts(model, (5, 3))]
    expected = Rig(torch_executor(model)).answer(requests)
    rig = Rig(cuda_executor(model, around_decode=lambda decode: FullDecode(decode, "step", 2)), depth=depth)
    for news in rig.updates(requests):
        assert isinstance(news[-1].error, ForwardFailed)
        assert "the decode did not fit into the GPU's memory" in str(news[-1].error)
    assert rig.answer(requests) == expected


class Lengths:
    """A prefill chain that notes how many tokens each forward was called with."""

    def __init__(self, chain: PrefillChain) -> None:
        self._chain = chain
        self.noted: list[int] = []

    def hidden(self, tokens: torch.Tensor, plan: PrefillPlan, rows: torch.Tensor) -> torch.Tensor:
        self.noted.append(len(tokens))
        return self._chain.hidden(tokens, plan, rows)


@pytest.mark.parametrize("name", MODELS)
def test_captured_prefills_give_the_same_tokens(name: str) -> None:
    """Steps of few tokens run at a captured width, wider ones eagerly; decodes ride in both."""
    model = tiny_model(name)
    requests = [request(prompt, NUM_TOKENS + index % 3) for index, prompt in enumerate(prompts(model))]
    few = [request(prompt) for prompt in prompts(model, (5, 14), seed=1)]
    plain = Rig(torch_executor(model))
    expected = plain.answer(requests), plain.answer_alone(few)
    chains: list[Lengths] = []

    def noting(chain: PrefillChain) -> Lengths:
        chains.append(Lengths(chain))
        return chains[-1]

    rig = Rig(cuda_executor(model, prefill=noting, captured_widths=(8, 32)), depth=2)
    captures = list(chains[0].noted)
    assert set(captures) == ({32, 8} if not INTERPRETED else set())
    assert (rig.answer(requests), rig.answer_alone(few)) == expected
    forwards = [sum(c.length for c in step.chunks) for step in rig.steps if any(c.length > 1 for c in step.chunks)]
    eager = [length for length in forwards if length > 32]
    padded = {8 if length <= 8 else 32 for length in forwards if length <= 32}
    assert padded == {8, 32}
    assert chains[0].noted[len(captures) :] == eager if not INTERPRETED else set(chains[0].noted) >= {*eager, *padded}


def test_prefills_are_captured_for_a_lone_sequence_too(model: Model) -> None:
    """A prefill selects at least m rows, which are more than may draw at once."""
    chains: list[Lengths] = []

    def noting(chain: PrefillChain) -> Lengths:
        chains.append(Lengths(chain))
        return chains[-1]

    rig = Rig(cuda_executor(model, prefill=noting, widths=(1,), captured_widths=(16,)), max_num_seqs=1)
    asked = [request(prompt, 1) for prompt in prompts(model, (9, 14))]
    assert rig.answer(asked) == Rig(torch_executor(model)).answer(asked)
    assert set(chains[0].noted) == {16}


@pytest.mark.parametrize("name", MODELS)
def test_steps_that_are_launched_and_not_captured_give_the_same_tokens(name: str) -> None:
    model = tiny_model(name)
    requests = [request(prompt, NUM_TOKENS) for prompt in prompts(model)]
    expected = Rig(torch_executor(model)).answer(requests)
    assert Rig(cuda_executor(model, captures=LaunchedSteps), depth=2).answer(requests) == expected


def test_slots_serve_many_sequences_after_one_another(model: Model) -> None:
    draw = random.Random(3)
    requests = [request(prompts(model, (draw.randint(1, 9),), seed)[0], draw.randint(1, 3)) for seed in range(12)]
    expected = Rig(torch_executor(model)).answer(requests)
    executor = cuda_executor(model, widths=(1, 2))
    assert Rig(executor, depth=2, max_num_seqs=2).answer(requests) == expected


def test_wide_steps_of_lone_tokens_are_one_replay_however_they_are_cut(model: Model) -> None:
    requests = [request(prompt) for prompt in prompts(model, (3, 4, 5, 6, 7))]
    expected = Rig(torch_executor(model)).answer(requests)
    rig = Rig(cuda_executor(model, max_prefill_tokens=2), depth=2)
    assert rig.answer(requests) == expected
    assert any(len(step.slices) == 3 and step.slices[0].method is Method.DECODE for step in rig.steps)


def test_cancelled_sequences_give_their_cells_and_slots_back(model: Model) -> None:
    requests = [request(prompt, 40) for prompt in prompts(model, (6, 9, 12))]
    expected = Rig(torch_executor(model)).answer(requests[2:]) if not INTERPRETED else None
    rig = Rig(cuda_executor(model), depth=2)
    ids = [rig.planner.submit(each) for each in requests]
    for _ in range(4):
        rig.turn()
    ended = rig.planner.cancel(ids[0]) + rig.planner.cancel(ids[1])
    assert [update.finish_reason for update in ended] == [FinishReason.CANCELLED] * 2
    if expected is None:
        rig.planner.cancel(ids[2])
    while rig.planner.has_work:
        rig.turn()
    state = rig.planner.snapshot()
    assert state.owned_cells == 0
    assert state.free_cells + state.cached_cells == state.capacity
    if expected is not None:
        assert rig.answer(requests[2:]) == expected


def _tokens(news: Sequence[Update]) -> list[int]:
    return [token for update in news for token in update.tokens]


def _assert_close(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs]) -> None:
    assert [score.token for score in ours] == [score.token for score in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in mine.top] == [token for token, _ in other.top]


@pytest.mark.skipif(INTERPRETED, reason="a load needs a GPU")
def test_random_load_leaves_no_cell_no_slot_and_no_memory_behind(model: Model) -> None:
    """Requests of every kind come, end and are cancelled, in a pool that is too small for them."""
    draw = random.Random(9)
    executor = cuda_executor(model, num_cells=300, widths=(1, 2, 4, 8))
    rig = Rig(executor, depth=2)
    live: list[int] = []
    sizes: list[int] = []
    for turn in range(LOAD_TURNS):
        if len(live) < 24 and draw.random() < 0.3:
            live.append(rig.planner.submit(_random_request(draw)))
        if live and draw.random() < 0.05:
            rig.planner.cancel(live.pop(draw.randrange(len(live))))
        ended = {update.request_id for update in rig.turn() if update.finish_reason is not None}
        live = [request_id for request_id in live if request_id not in ended]
        if turn % 200 == 0:
            sizes.append(torch.cuda.memory_allocated())
    while rig.planner.has_work:
        rig.turn()
    state = rig.planner.snapshot()
    assert state.owned_cells == 0
    assert state.free_cells + state.cached_cells == state.capacity
    assert rig.planner.metrics.num_preemptions > 0
    assert max(sizes[5:]) - min(sizes[5:]) < 8 << 20
    again = [request(prompt) for prompt in prompts(model, (5, 17))]
    assert rig.answer(again) == Rig(torch_executor(model)).answer(again)


LOAD_TURNS = 4000


def _random_request(draw: random.Random) -> Request:
    sampling = draw.choice(
        [
            GREEDY,
            SamplingParams(seed=draw.getrandbits(64), top_k=draw.randint(0, 9)),
            SamplingParams(temperature=0.0, logprobs=2),
            SamplingParams(presence_penalty=1.0, seed=1),
        ]
    )
    prompt = [draw.randrange(200) for _ in range(draw.choice((1, 2, 9, 40, 90)))]
    return request(prompt, draw.randint(1, 30), sampling, n=draw.choice((1, 1, 1, 3)))

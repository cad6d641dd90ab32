"""SmolLM2 in float32 answers as transformers does, however prompts are batched, cut, cached, preempted, forked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import transformers

from planner.request import Request, SamplingParams
from tests.tiny_models import greedy_answer
from tests.torch_rig import Rig, executor_of, load, request
from worker.program import Program

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_TOKENS = 5
SIZES = (1, 2, 3, 4, 5, 7, 8, 9, 11, 13, 16, 21, 27, 34, 40, 50, 64, 89, 160, 600)


@dataclass(frozen=True)
class Reference:
    """Our program, prompts of 1 to 600 tokens, and what transformers answers to them."""

    program: Program
    prompts: list[list[int]]
    answers: list[list[int]]

    def requests(self, sizes: Sequence[int] = SIZES) -> list[Request]:
        return [request(self.prompts[SIZES.index(size)], NUM_TOKENS) for size in sizes]

    def expected(self, sizes: Sequence[int] = SIZES) -> list[list[list[int]]]:
        return [[self.answers[SIZES.index(size)]] for size in sizes]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path) -> Reference:
    program = load(os.fspath(smollm2_path))
    random = np.random.default_rng(11)
    prompts = [random.integers(0, program.info.vocab_size, size=size).tolist() for size in SIZES]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype="float32"
    )
    return Reference(program, prompts, [greedy_answer(model, prompt, NUM_TOKENS) for prompt in prompts])


def test_each_prompt_alone(reference: Reference) -> None:
    assert Rig(executor_of(reference.program, 700)).answer_alone(reference.requests()) == reference.expected()


def test_all_prompts_batched_together(reference: Reference) -> None:
    assert Rig(executor_of(reference.program, 4096)).answer(reference.requests()) == reference.expected()


@pytest.mark.parametrize("min_prefill_tokens", [2, 5])
def test_chunks_of_eight_under_every_lower_bound_of_a_prefill(reference: Reference, min_prefill_tokens: int) -> None:
    sizes = (1, 4, 7, 9, 21, 64)
    rig = Rig(executor_of(reference.program, 512, min_prefill_tokens), prefill_chunk_tokens=8)
    assert rig.answer(reference.requests(sizes)) == reference.expected(sizes)


def test_warm_prefix(reference: Reference) -> None:
    sizes = (64, 160)
    rig = Rig(executor_of(reference.program, 700))
    assert rig.answer(reference.requests(sizes)) == reference.expected(sizes)
    for warm in reference.requests(sizes):
        rig.planner.submit(warm)
    updates = rig.run()
    assert any(update.num_cached_tokens > 0 for update in updates)
    tokens: dict[int, list[int]] = {}
    for update in updates:
        tokens.setdefault(update.request_id, []).extend(update.tokens)
    assert [[tokens[key]] for key in sorted(tokens)] == reference.expected(sizes)


def test_a_pool_too_small_for_all_at_once(reference: Reference) -> None:
    sizes = (21, 27, 34, 40)
    roomy, cramped = Rig(executor_of(reference.program, 700)), Rig(executor_of(reference.program, 46))
    assert roomy.answer(reference.requests(sizes)) == reference.expected(sizes)
    assert cramped.answer(reference.requests(sizes)) == reference.expected(sizes)
    assert len(cramped.steps) > len(roomy.steps)


def test_forks_of_a_greedy_prompt_all_say_the_same(reference: Reference) -> None:
    forked = replace(reference.requests((21,))[0], n=3)
    expected = reference.expected((21,))[0]
    assert Rig(executor_of(reference.program, 128)).answer([forked]) == [expected * 3]


def test_sampled_tokens_do_not_depend_on_batch_mates_or_preemption(reference: Reference) -> None:
    prompts = [reference.prompts[SIZES.index(size)] for size in (3, 9, 13, 21)]
    requests = [
        request(prompt, 6, SamplingParams(temperature=0.8, seed=2**63 + seed, top_p=0.95))
        for seed, prompt in enumerate(prompts)
    ]
    alone = Rig(executor_of(reference.program, 256)).answer_alone(requests)
    assert len({tuple(answer[0]) for answer in alone}) == len(alone)
    assert Rig(executor_of(reference.program, 256)).answer(requests) == alone
    assert Rig(executor_of(reference.program, 30)).answer(requests) == alone


def test_greedy_rows_are_not_disturbed_by_sampled_ones(reference: Reference) -> None:
    sizes = (9, 50)
    wild = [request([5, 6, 7], 10, SamplingParams(temperature=2.0, seed=seed)) for seed in range(3)]
    answers = Rig(executor_of(reference.program, 256)).answer([*wild, *reference.requests(sizes)])
    assert answers[3:] == reference.expected(sizes)

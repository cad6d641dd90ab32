"""Rows that follow a grammar, on the CUDA executor: each keeps to its own with two steps in flight, and its mates draw
what they draw without it. Runs on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

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

from planner.errors import ForwardFailed, GrammarFailed  # noqa: E402
from planner.request import FinishReason, Request, SamplingParams  # noqa: E402
from tests.cuda_rig import DEVICE, FullDecode, Model, Rig, cuda_executor, tiny_model, torch_executor  # noqa: E402
from tests.ladder_masks import LadderMasks, climbs  # noqa: E402
from worker.cuda.forbid import compile_forbid, forbid_rows  # noqa: E402
from worker.sampler import Draw, forbid  # noqa: E402

NUM_TOKENS = 4 if INTERPRETED else 40


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model()


def request(length: int, modulus: int | None, **options: Any) -> Request:
    sampling: dict[str, Any] = {"temperature": 0.0, **options.pop("sampling", {})}
    grammar = None if modulus is None else str(modulus)
    prompt = np.random.default_rng(length).integers(0, 200, size=length)
    return Request(prompt, NUM_TOKENS, SamplingParams(grammar=grammar, **sampling), **options)


def masks(model: Model, **options: Any) -> LadderMasks:
    return LadderMasks(model.decoder.config.vocab_size, **options)


@pytest.mark.parametrize("depth", [1, 2])
def test_each_row_keeps_to_its_own_grammar(model: Model, depth: int) -> None:
    hot = {"temperature": 1.2, "seed": 9}
    requests = [
        request(5, 7),
        request(9, None),
        request(17, 3, sampling=hot, n=2),
        request(4, 5, sampling={"repetition_penalty": 1.3}),
        request(6, None, sampling=hot),
    ]
    expected = Rig(torch_executor(model, grammars=masks(model))).answer(requests)
    for answers, modulus in zip(expected, (7, None, 3, 5, None), strict=True):
        assert modulus is None or all(climbs(tokens, modulus) for tokens in answers)
    rig = Rig(cuda_executor(model, grammars=masks(model)), depth=depth)
    assert rig.answer(requests) == expected
    unseen = [chunk for step in rig.steps for chunk in step.chunks if chunk.tokens is None and chunk.sampling.grammar]
    assert bool(unseen) == (depth == 2)
    assert expected[1] == Rig(torch_executor(model)).answer([requests[1]])[0]


def test_a_sequence_that_cannot_go_on_ends_alone(model: Model) -> None:
    rig = Rig(cuda_executor(model, grammars=masks(model, fails_after=2)), depth=2)
    broken, fine = rig.updates([request(5, 7), request(9, None)])
    assert isinstance(broken[-1].error, GrammarFailed)
    assert sum(len(update.tokens) for update in broken) == 2
    assert fine[-1].finish_reason is FinishReason.LENGTH


def test_an_executor_without_a_vocabulary_fails_what_needs_one(model: Model) -> None:
    broken, fine = Rig(cuda_executor(model), depth=2).updates([request(5, 7), request(9, None)])
    assert isinstance(broken[-1].error, GrammarFailed)
    assert fine[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("failing", [2, 3, 4])
def test_a_draw_without_room_ends_only_who_wanted_it(model: Model, depth: int, failing: int) -> None:
    """The first forward's draws are numbers 1 and 2 (of all rows, and again of those with a mask), then one a step."""
    requests = [request(5, 7), request(9, None), request(4, 5)]
    expected = Rig(torch_executor(model, grammars=masks(model))).answer(requests)
    executor = cuda_executor(
        model, grammars=masks(model), around_decode=lambda decode: FullDecode(decode, "draw", failing)
    )
    rig = Rig(executor, depth=depth)
    broken, fine, too = rig.updates(requests)
    for news in (broken, too):
        assert isinstance(news[-1].error, ForwardFailed)
        assert "drawing a token" in str(news[-1].error)
    assert fine[-1].finish_reason is FinishReason.LENGTH
    assert [token for update in fine for token in update.tokens] == expected[1][0]
    assert rig.answer(requests) == expected


@pytest.mark.parametrize("num_bytes", [1, 28, 514, 1040])
@pytest.mark.parametrize("vocab_size", [203, 4112, 8192])
def test_masks_of_any_length_leave_what_plain_torch_leaves(vocab_size: int, num_bytes: int) -> None:
    compile_forbid(vocab_size, DEVICE)
    draw = np.random.default_rng(num_bytes)
    logits = torch.from_numpy(draw.normal(size=(4, vocab_size)).astype(np.float32)).to(DEVICE)
    masks = {row: draw.integers(0, 256, size=num_bytes, dtype=np.uint8) for row in (3, 1)}
    expected = logits.clone()
    forbid(expected, [Draw(SamplingParams(), 1, allowed=masks.get(row)) for row in range(4)])
    forbid_rows(logits, masks, lambda values: torch.from_numpy(values).to(DEVICE))
    assert torch.equal(logits, expected)

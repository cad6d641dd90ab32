"""What a request may say, and what is refused with the field and the numbers; the error tree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import errors
from planner.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NeverFits,
    QueueFull,
    RaycombError,
    RequestFailed,
    error_from_code,
)
from planner.limits import Limits
from planner.planner import Planner
from planner.request import Request, SamplingParams, sequence_seed
from tests.strategies import UNHURRIED, requests


def request(prompt: list[int] | None = None, max_tokens: int = 4, **changes: Any) -> Request:
    return Request(np.array([1, 2, 3] if prompt is None else prompt, np.int64), max_tokens, **changes)


def planner(**changes: Any) -> Planner:
    fields = {"capacity": 16, "context": 32, "vocab_size": 10, "max_num_seqs": 4, "max_batched_tokens": 8}
    return Planner(Limits(**(fields | changes)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**64),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0.0),
        ("logit_bias", ((3, 101.0),)),
        ("logprobs", 21),
        ("logprobs", -1),
    ],
)
def test_a_sampling_setting_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as refusal:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert refusal.value.param == field


@pytest.mark.parametrize(
    ("changes", "needs_history"),
    [
        ({}, False),
        ({"seed": 5, "top_k": 3, "top_p": 0.5, "logit_bias": ((1, 2.0),), "logprobs": 20}, False),
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_only_penalties_read_the_history(changes: dict[str, Any], needs_history: bool) -> None:
    assert SamplingParams(**changes).needs_history is needs_history


def test_temperature_zero_is_greedy() -> None:
    assert SamplingParams(temperature=0.0).greedy
    assert not SamplingParams(temperature=0.1).greedy


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "prompt_logprobs": True}, "max_tokens"),
        ({"min_tokens": 5}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"priority": 2**31}, "priority"),
    ],
)
def test_a_malformed_request_is_refused_by_field(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        request(**changes)
    assert refusal.value.param == param


@pytest.mark.parametrize("prompt", [np.zeros((2, 2), np.int64), np.array([1.5])])
def test_a_prompt_is_one_list_of_integers(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match="one list of token ids"):
        Request(prompt, 1)


def test_no_token_at_all_can_be_asked_for_only_with_prompt_logprobs() -> None:
    assert request(max_tokens=0, prompt_logprobs=True).max_tokens == 0


@UNHURRIED
@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**16))
def test_every_index_draws_from_a_stream_of_its_own(seed: int, index: int) -> None:
    assert sequence_seed(seed, 0) == seed
    assert 0 <= sequence_seed(seed, index) < 2**64
    assert sequence_seed(seed, index) != sequence_seed(seed, index + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [1, 10]}, r"prompt has token id 10, and the vocabulary is \[0, 10\)"),
        ({"prompt": [1, -3]}, r"prompt has token id -3, and the vocabulary is \[0, 10\)"),
        ({"stop_token_ids": frozenset({12})}, r"stop_token_ids has token id 12"),
        ({"sampling": SamplingParams(logit_bias=((99, 1.0),))}, r"logit_bias has token id 99"),
        ({"sampling": SamplingParams(bad_words=((1, 10),))}, r"bad_words has token id 10"),
        ({"n": 5}, r"n = 5 sequences are asked for, and at most 4 run at once"),
    ],
)
def test_a_worker_refuses_what_its_program_does_not_have(changes: dict[str, Any], message: str) -> None:
    refusing = planner()
    with pytest.raises(InvalidRequest, match=message):
        refusing.submit(request(**changes))
    assert not refusing.has_work
    assert refusing.metrics.num_requests_refused == 1
    assert refusing.metrics.num_requests_submitted == 0


def test_prompt_and_answer_must_fit_the_context() -> None:
    with pytest.raises(
        ContextLengthExceeded, match=r"has 30 tokens and max_tokens is 3: 33 together.*is 32"
    ) as refusal:
        planner(capacity=64).submit(request([1] * 30, 3))
    assert refusal.value.param == "max_tokens"
    planner(capacity=64).submit(request([1] * 30, 2))


@pytest.mark.parametrize("num_prompt", [32, 33])
def test_a_prompt_that_fills_the_context_leaves_no_room_for_an_answer(num_prompt: int) -> None:
    with pytest.raises(ContextLengthExceeded) as refusal:
        planner(capacity=64).submit(request([1] * num_prompt, 1))
    assert refusal.value.param == "prompt"
    planner(capacity=64).submit(request([1] * 32, 0, prompt_logprobs=True))


def test_a_request_larger_than_the_pool_never_fits_and_is_told_the_numbers() -> None:
    """The last token of an answer is never fed, so prompt + max_tokens - 1 cells are enough."""
    with pytest.raises(NeverFits, match="prompt of 10 tokens and max_tokens = 8 need 17 cells, and the pool has 16"):
        planner().submit(request([1] * 10, 8))
    planner().submit(request([1] * 10, 7))
    with pytest.raises(NeverFits):
        planner().submit(request([1] * 17, 0, prompt_logprobs=True))
    planner().submit(request([1] * 16, 0, prompt_logprobs=True))


def test_a_full_queue_refuses_and_keeps_what_it_has() -> None:
    full = planner(max_waiting=2)
    accepted = [full.submit(request()) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting") as refusal:
        full.submit(request())
    assert refusal.value.retry_after_s > 0
    assert accepted == [1, 2]
    assert full.snapshot().num_waiting == 2
    full.plan()
    assert full.submit(request()) == 3


@UNHURRIED
@given(requests(vocab_size=10, max_prompt=8, max_tokens=4, max_n=4))
def test_what_the_strategies_make_is_accepted(made: Request) -> None:
    assert planner().submit(made) == 1


def every_error() -> list[type[RaycombError]]:
    return [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RaycombError)]


@pytest.mark.parametrize("kind", every_error())
def test_an_error_survives_the_wire(kind: type[RaycombError]) -> None:
    rebuilt = error_from_code(kind.code, "what happened", "prompt")
    assert type(rebuilt) is kind
    assert (rebuilt.message, rebuilt.param, str(rebuilt)) == ("what happened", "prompt", "what happened")


def test_codes_are_unique_and_an_unknown_one_is_a_failure() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(set(codes)) == len(codes)
    assert type(error_from_code("from_the_future", "?")) is RequestFailed

"""What is put on the wire comes out the same at the other end, through the bytes."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import (
    ContextLengthExceeded,
    DeadlineUnmeetable,
    ForwardFailed,
    InvalidRequest,
    QueueFull,
    RaycombError,
    RequestFailed,
    RequestRefused,
    Unavailable,
    WorkerLost,
)
from planner.limits import Snapshot
from planner.request import Adapter, FinishReason, Pooling, Request, SamplingParams, TokenLogprobs, Update
from protos import worker_pb2 as pb
from worker import wire

token_ids = st.integers(0, 2**31 - 1)
counts = st.integers(0, 2**32 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)

samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(1e-6, 100),
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=4).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    logprobs=st.none() | st.integers(0, 20),
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
adapters = st.builds(Adapter, names, st.integers(1, 2**64 - 1))
requests = st.builds(
    Request,
    prompt=st.lists(token_ids, min_size=1, max_size=50).map(lambda ids: np.array(ids, dtype=np.int64)),
    max_tokens=st.integers(1, 2**31 - 1),
    sampling=samplings,
    min_tokens=st.integers(0, 1),
    stop_token_ids=st.frozensets(token_ids, max_size=5),
    n=st.integers(1, 2**16),
    priority=st.integers(-(2**31), 2**31 - 1),
    prompt_logprobs=st.booleans(),
    tenant=st.text(st.characters(exclude_categories=["Cs"]), max_size=64),
    adapter=st.none() | adapters,
).flatmap(
    lambda request: st.integers(0, len(request.prompt) - 1).map(lambda k: dataclasses.replace(request, num_generated=k))
) | st.builds(
    Request,
    prompt=st.lists(token_ids, min_size=1, max_size=50).map(lambda ids: np.array(ids, dtype=np.int64)),
    max_tokens=st.just(0),
    pooling=st.sampled_from(Pooling),
)
token_logprobs = st.builds(
    TokenLogprobs,
    token=token_ids,
    logprob=st.none() | floats,
    top=st.lists(st.tuples(token_ids, floats), max_size=3).map(tuple),
)
messages = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
params = st.none() | st.sampled_from(["prompt", "max_tokens"])
failures = st.builds(ForwardFailed, messages, param=params) | st.builds(WorkerLost, messages, param=params)
refusals = (
    st.builds(InvalidRequest, messages, param=params)
    | st.builds(ContextLengthExceeded, messages, param=params)
    | st.builds(Unavailable, messages, param=params)
    | st.builds(RequestRefused, messages, param=params)
    | st.builds(QueueFull, messages, param=params, retry_after_s=st.floats(0, 1000))
    | st.builds(DeadlineUnmeetable, messages, param=params, retry_after_s=st.floats(0, 1000))
)
updates = st.builds(
    Update,
    request_id=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**16),
    tokens=st.lists(token_ids, max_size=5).map(tuple),
    logprobs=st.lists(token_logprobs, max_size=3).map(tuple),
    prompt_logprobs=st.lists(token_logprobs, max_size=3).map(tuple),
    num_cached_tokens=counts,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.none() | failures,
    vector=st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(tuple),
)


def fields(error: RaycombError) -> tuple[Any, ...]:
    return type(error), error.message, error.param, getattr(error, "retry_after_s", None)


def submit_bytes(**changes: Any) -> pb.Submit:
    request = Request(prompt=np.array([1, 2], dtype=np.int64), max_tokens=4)
    submit = wire.request_to_proto(7, request)
    for name, value in changes.items():
        setattr(submit, name, value)
    return submit


@given(st.integers(0, 2**64 - 1), requests)
def test_a_request_survives_the_wire(request_id: int, request: Request) -> None:
    submit = pb.Submit.FromString(wire.request_to_proto(request_id, request).SerializeToString())
    received = wire.request_from_proto(submit)
    assert submit.request_id == request_id
    assert received.prompt.dtype == np.int64
    assert received.prompt.tolist() == request.prompt.tolist()
    names = [field.name for field in dataclasses.fields(Request) if field.name not in ("prompt", "deadline")]
    for name in names:
        assert getattr(received, name) == getattr(request, name), name


@given(st.integers(-1_000, 10**9))
def test_a_deadline_travels_as_the_time_that_is_left(left_ms: int) -> None:
    """Clocks of two machines have nothing to do with each other. What has passed has passed there as well."""
    deadline = time.monotonic() + left_ms / 1000
    request = Request(prompt=np.array([1], dtype=np.int64), max_tokens=1, deadline=deadline)
    submit = wire.request_to_proto(1, request)
    assert 0 <= submit.timeout_ms <= max(0, left_ms)
    received = wire.request_from_proto(submit)
    assert received.deadline is not None
    assert max(0, left_ms) / 1000 - 0.5 < received.deadline - time.monotonic() < max(0, left_ms) / 1000 + 0.5


def sent(request_id: int, update: Update | RequestRefused) -> pb.SequenceUpdate:
    """As it arrives."""
    message = pb.SequenceUpdate()
    wire.write_update(message, request_id, update)
    return pb.SequenceUpdate.FromString(message.SerializeToString())


@given(updates)
def test_an_update_survives_the_wire(update: Update) -> None:
    received = wire.update_from_proto(sent(update.request_id, update))
    assert isinstance(received, Update)
    for name in Update._fields:
        if name != "error":
            assert getattr(received, name) == getattr(update, name), name
    assert (received.error is None) == (update.error is None)
    if received.error is not None and update.error is not None:
        assert fields(received.error) == fields(update.error)


@given(refusals)
def test_a_refusal_survives_the_wire_with_its_type(refusal: RequestRefused) -> None:
    message = sent(3, refusal)
    received = wire.update_from_proto(message)
    assert isinstance(received, RequestRefused)
    assert (message.request_id, message.index) == (3, 0)
    assert fields(received) == fields(refusal)


@given(st.builds(Snapshot, *[counts] * 8, st.none() | st.floats(0, 1e9)), st.booleans())
def test_a_snapshot_survives_the_wire(snapshot: Snapshot, draining: bool) -> None:
    message = pb.Snapshot.FromString(wire.snapshot_to_proto(snapshot, draining=draining).SerializeToString())
    assert wire.snapshot_from_proto(message) == snapshot
    assert message.draining is draining


def test_the_gateways_request_id_replaces_the_planners() -> None:
    assert sent(99, Update(request_id=1, index=0)).request_id == 99


@pytest.mark.parametrize("token", [-1, 2**31])
def test_a_token_id_that_cannot_travel_is_refused_by_name(token: int) -> None:
    prompt = np.array([1, token], dtype=np.int64)
    with pytest.raises(InvalidRequest, match=f"{token} in prompt") as refusal:
        wire.request_to_proto(1, Request(prompt=prompt, max_tokens=1))
    assert refusal.value.param == "prompt"
    biased = SamplingParams(logit_bias=((token, 1.0),))
    with pytest.raises(InvalidRequest, match="logit_bias"):
        wire.request_to_proto(1, Request(prompt=prompt[:1], max_tokens=1, sampling=biased))
    bad = SamplingParams(bad_words=((1, token),))
    with pytest.raises(InvalidRequest, match="bad_words"):
        wire.request_to_proto(1, Request(prompt=prompt[:1], max_tokens=1, sampling=bad))
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        wire.request_to_proto(1, Request(prompt=prompt[:1], max_tokens=1, stop_token_ids=frozenset({token})))


@pytest.mark.parametrize(("field", "value"), [("max_tokens", 0), ("n", 0), ("min_tokens", 9)])
def test_a_malformed_submit_is_an_invalid_request_that_names_the_field(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        wire.request_from_proto(submit_bytes(**{field: value}))
    assert refusal.value.param == field


def test_a_submit_without_prompt_or_sampling_is_an_invalid_request() -> None:
    submit = submit_bytes()
    submit.ClearField("prompt")
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        wire.request_from_proto(submit)
    submit = submit_bytes()
    submit.ClearField("sampling")
    with pytest.raises(InvalidRequest, match="sampling"):
        wire.request_from_proto(submit)
    submit = submit_bytes()
    submit.sampling.temperature = math.nan
    with pytest.raises(InvalidRequest, match="temperature"):
        wire.request_from_proto(submit)


def test_words_of_a_newer_peer_still_end_a_sequence() -> None:
    unknown_error = pb.Error(code="from_the_future", message="what?")
    message = pb.SequenceUpdate(request_id=1, finish_reason=77, error=unknown_error)  # type: ignore[arg-type]
    update = wire.update_from_proto(message)
    assert isinstance(update, Update)
    assert update.finish_reason is FinishReason.FAILED
    assert type(update.error) is RequestFailed
    refused = pb.SequenceUpdate(request_id=1, finish_reason=pb.FINISH_REASON_REFUSED, error=unknown_error)
    assert type(wire.update_from_proto(refused)) is RequestRefused


def test_a_grammar_and_bad_words_survive_the_wire() -> None:
    sampling = SamplingParams(grammar='start: "é"', bad_words=((1, 2), (3,)))
    request = Request(prompt=np.array([1]), max_tokens=1, sampling=sampling)
    submit = pb.Submit.FromString(wire.request_to_proto(1, request).SerializeToString())
    assert wire.request_from_proto(submit).sampling == sampling

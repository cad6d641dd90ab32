"""The HTTP schema by itself: strictness, nulls, unknown names, and the error table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.errors import OUTCOMES, envelope, outcome, retry_after_s
from cluster.web.bodies import parse_object, validate
from planner import errors
from planner.errors import InvalidRequest, QueueFull, RaycombError
from protos.openai import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from protos.openai_body import Body

BODIES: list[type[Body]] = [CompletionBody, ChatBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody]
LEAST: dict[type[Body], dict[str, Any]] = {
    CompletionBody: {"prompt": "x"},
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    TokenizeTextBody: {"prompt": "x"},
    TokenizeChatBody: {"messages": [{"role": "user", "content": "x"}]},
    DetokenizeBody: {"tokens": []},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("kind", BODIES)
def test_every_optional_field_may_be_null(kind: type[Body]) -> None:
    given_fields = dict.fromkeys({**kind.model_fields, **kind.unsupported}) | LEAST[kind]
    assert validate(kind, given_fields) == validate(kind, LEAST[kind])


@pytest.mark.parametrize("kind", BODIES)
def test_every_unsupported_field_is_refused_by_name_unless_neutral(kind: type[Body]) -> None:
    for name, neutral in kind.unsupported.items():
        with pytest.raises(InvalidRequest, match=name) as caught:
            validate(kind, {**LEAST[kind], name: {"odd": 1}})
        assert caught.value.param == name
        for value in neutral:
            assert validate(kind, {**LEAST[kind], name: value}) == validate(kind, LEAST[kind])


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (CompletionBody, "max_token", "; did you mean max_tokens?"),
        (CompletionBody, "temprature", "; did you mean temperature?"),
        (CompletionBody, "messages", "; /v1/chat/completions has it; a completion has a prompt"),
        (ChatBody, "prompt", "; /v1/completions has it; a chat has messages"),
        (ChatBody, "max_new_tokens", "; did you mean max_tokens?"),
        (ChatBody, "odd", ""),
        (ChatBody, "max_tokens" * 5, ""),
    ],
)
def test_an_unknown_field_is_refused_with_what_may_have_been_meant(kind: type[Body], name: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(kind, {**LEAST[kind], name: [1]})
    assert caught.value.message == f"{name} is not a field of this request{hint}"
    assert caught.value.param == name


@pytest.mark.parametrize("kind", BODIES)
def test_no_field_is_both_supported_and_not(kind: type[Body]) -> None:
    assert not {*kind.unsupported, *kind.elsewhere} & set(kind.model_fields)


@pytest.mark.parametrize("kind", BODIES)
@given(data=st.data())
def test_no_value_of_any_field_does_more_than_be_refused(kind: type[Body], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted({*kind.model_fields, *kind.unsupported, "odd"})))
    body = {**LEAST[kind], name: data.draw(JSON)}
    param = None
    try:
        validate(kind, body)
    except InvalidRequest as refused:
        param = refused.param
    assert param is None or param in body


@given(data=st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    try:
        assert isinstance(parse_object(data), dict)
    except InvalidRequest as refused:
        refused.message.encode()


def test_types_are_not_guessed() -> None:
    for name, value in (("n", True), ("n", "1"), ("n", 1.0), ("temperature", "1"), ("stream", 1), ("stream", "true")):
        with pytest.raises(InvalidRequest) as caught:
            validate(CompletionBody, {"prompt": "x", name: value})
        assert caught.value.param == name
    assert validate(CompletionBody, {"prompt": "x", "temperature": 1}).temperature == 1.0


def test_neutral_values_are_told_apart_by_type() -> None:
    with pytest.raises(InvalidRequest, match="use_beam_search"):
        validate(CompletionBody, {"prompt": "x", "use_beam_search": 0})
    with pytest.raises(InvalidRequest, match="best_of"):
        validate(CompletionBody, {"prompt": "x", "best_of": True})


def test_an_error_deep_inside_says_where() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": 5}]}]
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.content\[0\]\.text") as caught:
        validate(ChatBody, {"messages": messages})
    assert caught.value.param == "messages"


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest, match="prompt is missing"):
        validate(CompletionBody, {})


def test_parts_are_joined_by_line_ends() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = validate(ChatBody, {"messages": [{"role": "developer", "content": parts, "name": "me"}]})
    assert body.messages[0].for_template() == {"role": "system", "content": "a\nb", "name": "me"}


def test_bodies_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        validate(CompletionBody, {"prompt": "x"}).n = 2  # type: ignore[misc]


def every_error(kind: type[RaycombError] = RaycombError) -> list[type[RaycombError]]:
    return [kind, *(one for child in kind.__subclasses__() for one in every_error(child))]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_a_row_and_an_envelope(kind: type[RaycombError]) -> None:
    error = kind("what and why", param="n")
    row = outcome(error)
    assert 400 <= row.status < 600
    assert (row.status < 500) == (row.type not in ("server_error",))
    assert envelope(error) == {"error": {"message": "what and why", "type": row.type, "param": "n", "code": kind.code}}


def test_an_error_without_its_own_row_takes_its_nearest_ancestors() -> None:
    assert errors.ContextLengthExceeded not in OUTCOMES
    assert outcome(errors.ContextLengthExceeded("x")) is OUTCOMES[errors.InvalidRequest]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (QueueFull("x", retry_after_s=0.01), 1),
        (QueueFull("x", retry_after_s=2.1), 3),
        (errors.Unavailable("x"), 1),
        (errors.InvalidRequest("x"), None),
    ],
)
def test_the_advice_to_come_back_is_in_whole_seconds(error: RaycombError, seconds: int | None) -> None:
    assert retry_after_s(error) == seconds


def test_grpc_names_are_status_codes() -> None:
    import grpc

    assert {row.grpc for row in OUTCOMES.values()} <= {code.name for code in grpc.StatusCode}

"""Sessions over HTTP: histories that are extended, forked and closed, who may do so, and what is refused and how."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.api_settings import ApiSettings
from cluster.sessions.owner import session_limits
from planner.errors import ForwardFailed
from tests.grammar_rig import TEXT
from tests.http_desk import CHAT, Desk, desk, refusal, says
from tests.session_rig import owner_of_kind
from tests.tiny_text import EOS

COMPLETIONS = "/v1/completions"


@pytest.fixture(params=["local", "remote"])
def owner(request: pytest.FixtureRequest) -> str:
    """Who keeps the sessions: the application itself, or a keeper over gRPC. Nobody can tell."""
    kind: str = request.param
    return kind


@asynccontextmanager
async def kept_by(owner: str, script: Any = None, **settings: Any) -> AsyncIterator[Desk]:
    limits = session_limits(ApiSettings(**settings))
    async with owner_of_kind(owner, limits) as kept, desk(script, sessions=kept, **settings) as d:
        yield d


async def opened(d: Desk) -> str:
    answer = await d.post("/v1/sessions")
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def extend(d: Desk, session: str, prompt: Any, **body: Any) -> dict[str, Any]:
    answer = await d.post(COMPLETIONS, **{"prompt": prompt, "max_tokens": 4, "session_id": session, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def card(d: Desk, session: str) -> dict[str, Any]:
    told: dict[str, Any] = (await d.http.get(f"/v1/sessions/{session}")).json()
    return told


async def test_a_session_goes_on_with_everything_that_was_said(owner: str) -> None:
    async with kept_by(owner, says("hi", "yes")) as d:
        session = await opened(d)
        assert (await card(d, session))["position"] == 0
        await extend(d, session, "hello")
        after = await card(d, session)
        history = [*TEXT.encode("hello"), *TEXT.encode("hi"), EOS]
        assert d.fleet.requests[0].prompt.tolist() == TEXT.encode("hello")
        assert (after["position"], after["has_pending"], after["state"]) == (len(history) - 1, True, "idle")
        told = await extend(d, session, " ab")
        assert d.fleet.requests[1].prompt.tolist() == [*history, *TEXT.encode(" ab")]
        assert told["usage"]["prompt_tokens"] == len(history) + len(TEXT.encode(" ab"))


async def test_a_stream_and_a_stop_string_keep_what_came_until_then(owner: str) -> None:
    async with kept_by(owner, says("hello world")) as d:
        session = await opened(d)
        await d.events(COMPLETIONS, prompt="ab", max_tokens=30, session_id=session, stop="wor")
        ids = TEXT.encode("hello world")
        length = next(n for n in range(len(ids)) if "wor" in TEXT.decode(ids[:n]))
        await extend(d, session, [5])
        assert d.fleet.requests[1].prompt.tolist() == [*TEXT.encode("ab"), *ids[:length], 5]


async def test_a_header_names_the_session_too(owner: str) -> None:
    async with kept_by(owner, says("hi")) as d:
        session = await opened(d)
        body = {"prompt": "hello", "max_tokens": 4}
        answer = await d.http.post(COMPLETIONS, json=body, headers={"x-session-id": session})
        assert answer.status_code == 200
        assert (await card(d, session))["position"] > 0
        both = await d.http.post(COMPLETIONS, json={**body, "session_id": "x"}, headers={"x-session-id": session})
        assert refusal(both)["param"] == "session_id"
        chat = await d.http.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": session})
        assert refusal(chat)["param"] == "x-session-id"


async def test_forks_share_what_came_before_and_nothing_after(owner: str) -> None:
    async with kept_by(owner, says("hi", "yes")) as d:
        session = await opened(d)
        await extend(d, session, "hello")
        position = (await card(d, session))["position"]
        whole = (await d.post(f"/v1/sessions/{session}/fork")).json()
        cut = (await d.post(f"/v1/sessions/{session}/fork", at=2)).json()
        empty = (await d.post(f"/v1/sessions/{session}/fork", at=0)).json()
        assert [one["position"] for one in (whole, cut, empty)] == [position, 2, 0]
        assert [one["has_pending"] for one in (whole, cut, empty)] == [True, False, False]
        history = [*TEXT.encode("hello"), *TEXT.encode("hi"), EOS]
        for fork, kept in ((whole, history), (cut, history[:2]), (empty, [])):
            await extend(d, fork["id"], [7, 8])
            assert d.fleet.requests[-1].prompt.tolist() == [*kept, 7, 8]
        assert (await card(d, session))["position"] == position
        for at in (-1, position + 1):
            error = refusal(await d.post(f"/v1/sessions/{session}/fork", at=at))
            assert error["message"].startswith("session position is invalid")


async def test_sessions_are_listed_and_closed(owner: str) -> None:
    async with kept_by(owner, says("hi")) as d:
        ids = [await opened(d) for _ in range(3)]
        assert [one["id"] for one in (await d.http.get("/v1/sessions")).json()["data"]] == ids
        assert (await d.http.delete(f"/v1/sessions/{ids[1]}")).json()["deleted"]
        assert [one["id"] for one in (await d.http.get("/v1/sessions")).json()["data"]] == [ids[0], ids[2]]
        gone = await d.http.delete(f"/v1/sessions/{ids[1]}")
        assert refusal(gone, 404)["code"] == "session_not_found"
        late = await d.post(COMPLETIONS, prompt="x", session_id=ids[1])
        assert refusal(late, 404)["message"] == "session is not open"


async def test_one_generation_at_a_time_and_a_close_ends_it(owner: str) -> None:
    async with kept_by(owner, says("hello world")) as d:
        session = await opened(d)
        d.fleet.gate.clear()
        running = asyncio.create_task(d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session))
        while not d.fleet.requests:  # noqa: ASYNC110 - no event for it
            await asyncio.sleep(0.005)
        busy = await d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session)
        assert refusal(busy, 409)["message"] == "session already has an active generation"
        assert (await card(d, session))["state"] == "busy"
        assert (await d.http.delete(f"/v1/sessions/{session}")).status_code == 200
        d.fleet.gate.set()
        assert refusal(await running, 404)["message"] == "session is not open"
        assert d.fleet.num_running == 0


async def test_after_a_failure_a_session_takes_no_more(owner: str) -> None:
    async with kept_by(owner, says("hello world")) as d:
        session = await opened(d)
        d.fleet.fail_after = (2, ForwardFailed("it broke"))
        assert (await d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session)).status_code == 500
        d.fleet.fail_after = None
        for answer in (
            await d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session),
            await d.post(f"/v1/sessions/{session}/fork"),
        ):
            assert refusal(answer, 409)["message"] == "session cannot continue after an executor failure"


async def test_a_refused_request_leaves_the_session_as_it_was(owner: str) -> None:
    async with kept_by(owner, says("hi")) as d:
        session = await opened(d)
        await extend(d, session, "hello")
        before = await card(d, session)
        for body in ({"top_p": 7.0}, {"stop_token_ids": [10**6]}, {"prompt": [10**6]}, {"guided_regex": "("}):
            refusal(await d.post(COMPLETIONS, **{"prompt": "x", "max_tokens": 2, "session_id": session, **body}))
            assert await card(d, session) == before
        await extend(d, session, "x")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"max_tokens": 0, "prompt": ""}, "max_new_tokens must be greater than zero"),
        ({"prompt": ""}, "generation delta must not be empty"),
        ({"prompt": [5] * 64}, "generation delta exceeds the session position range"),
        ({"prompt": ["a", "b"]}, "a session takes one prompt at a time"),
        ({"n": 2}, "a session allows no n over 1"),
        ({"best_of": 2}, "a session allows no best_of over 1"),
        ({"echo": True}, "a session allows no echo"),
        ({"truncate_prompt_tokens": 2}, "a session allows no truncate_prompt_tokens"),
        ({"max_tokens": 64}, "maximum context length"),
    ],
)
async def test_what_no_session_takes_is_refused_in_its_words(owner: str, body: dict[str, Any], words: str) -> None:
    async with kept_by(owner, says("hi")) as d:
        session = await opened(d)
        asked = {"prompt": "hello", "max_tokens": 4, "session_id": session, **body}
        assert words in refusal(await d.post(COMPLETIONS, **asked))["message"]
        assert not d.fleet.requests


async def test_a_session_is_its_keys_own(owner: str) -> None:
    async with kept_by(owner, says("hi"), api_keys=("one", "two"), max_sessions_per_key=1) as d:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        session = (await d.http.post("/v1/sessions", headers=mine)).json()["id"]
        assert (await d.http.get(f"/v1/sessions/{session}", headers=mine)).status_code == 200
        assert (await d.http.get(f"/v1/sessions/{session}", headers=theirs)).status_code == 404
        assert (await d.http.get("/v1/sessions", headers=theirs)).json()["data"] == []
        again = await d.http.post("/v1/sessions", headers=mine)
        assert refusal(again, 429)["message"].endswith("at most 1 may be: close one")
        assert (await d.http.post("/v1/sessions", headers=theirs)).status_code == 200

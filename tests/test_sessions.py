"""Sessions over HTTP: histories that are extended, forked and closed, who may do so, and what is refused and how."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.answer_maker import AnswerMaker, Service
from cluster.api_settings import ApiSettings
from cluster.sessions import Sessions
from planner.errors import ForwardFailed, InvalidRequest
from planner.planner import Planner
from tests.fake_fleet import FakeFleet
from tests.fakes import FakeExecutor, fake_info, fake_limits, fake_request
from tests.grammar_rig import TEXT
from tests.http_desk import CHAT, MODEL, Desk, desk, refusal, says
from tests.tiny_text import EOS

COMPLETIONS = "/v1/completions"


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


async def test_a_session_goes_on_with_everything_that_was_said() -> None:
    async with desk(says("hi", "yes")) as d:
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


async def test_a_stream_and_a_stop_string_keep_what_came_until_then() -> None:
    async with desk(says("hello world")) as d:
        session = await opened(d)
        await d.events(COMPLETIONS, prompt="ab", max_tokens=30, session_id=session, stop="wor")
        ids = TEXT.encode("hello world")
        length = next(n for n in range(len(ids)) if "wor" in TEXT.decode(ids[:n]))
        await extend(d, session, [5])
        assert d.fleet.requests[1].prompt.tolist() == [*TEXT.encode("ab"), *ids[:length], 5]


async def test_a_header_names_the_session_too() -> None:
    async with desk(says("hi")) as d:
        session = await opened(d)
        body = {"prompt": "hello", "max_tokens": 4}
        answer = await d.http.post(COMPLETIONS, json=body, headers={"x-session-id": session})
        assert answer.status_code == 200
        assert (await card(d, session))["position"] > 0
        both = await d.http.post(COMPLETIONS, json={**body, "session_id": "x"}, headers={"x-session-id": session})
        assert refusal(both)["param"] == "session_id"
        chat = await d.http.post("/v1/chat/completions", json=CHAT, headers={"x-session-id": session})
        assert refusal(chat)["param"] == "x-session-id"


async def test_forks_share_what_came_before_and_nothing_after() -> None:
    async with desk(says("hi", "yes")) as d:
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


async def test_sessions_are_listed_and_closed() -> None:
    async with desk(says("hi")) as d:
        ids = [await opened(d) for _ in range(3)]
        assert [one["id"] for one in (await d.http.get("/v1/sessions")).json()["data"]] == ids
        assert (await d.http.delete(f"/v1/sessions/{ids[1]}")).json()["deleted"]
        assert [one["id"] for one in (await d.http.get("/v1/sessions")).json()["data"]] == [ids[0], ids[2]]
        gone = await d.http.delete(f"/v1/sessions/{ids[1]}")
        assert refusal(gone, 404)["code"] == "session_not_found"
        late = await d.post(COMPLETIONS, prompt="x", session_id=ids[1])
        assert refusal(late, 404)["message"] == "session is not open"


async def test_one_generation_at_a_time_and_a_close_ends_it() -> None:
    async with desk(says("hello world")) as d:
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


async def test_after_a_failure_a_session_takes_no_more() -> None:
    async with desk(says("hello world")) as d:
        session = await opened(d)
        d.fleet.fail_after = (2, ForwardFailed("it broke"))
        assert (await d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session)).status_code == 500
        d.fleet.fail_after = None
        for answer in (
            await d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session),
            await d.post(f"/v1/sessions/{session}/fork"),
        ):
            assert refusal(answer, 409)["message"] == "session cannot continue after an executor failure"


async def test_a_refused_request_leaves_the_session_as_it_was() -> None:
    async with desk(says("hi")) as d:
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
        ({"n": 2}, "a session allows no echo"),
        ({"echo": True}, "a session allows no echo"),
        ({"max_tokens": 64}, "over the context length"),
    ],
)
async def test_what_no_session_takes_is_refused_in_its_words(body: dict[str, Any], words: str) -> None:
    async with desk(says("hi")) as d:
        session = await opened(d)
        asked = {"prompt": "hello", "max_tokens": 4, "session_id": session, **body}
        assert words in refusal(await d.post(COMPLETIONS, **asked))["message"]
        assert not d.fleet.requests


async def test_a_session_is_its_keys_own() -> None:
    async with desk(says("hi"), api_keys=("one", "two"), max_sessions_per_key=1) as d:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
        session = (await d.http.post("/v1/sessions", headers=mine)).json()["id"]
        assert (await d.http.get(f"/v1/sessions/{session}", headers=mine)).status_code == 200
        assert (await d.http.get(f"/v1/sessions/{session}", headers=theirs)).status_code == 404
        assert (await d.http.get("/v1/sessions", headers=theirs)).json()["data"] == []
        again = await d.http.post("/v1/sessions", headers=mine)
        assert refusal(again, 429)["message"].endswith("at most 1 may be: close one")
        assert (await d.http.post("/v1/sessions", headers=theirs)).status_code == 200


async def test_an_idle_session_is_forgotten() -> None:
    sessions = Sessions(max_sessions=9, max_per_account=9, idle_s=0.05)
    old = sessions.open("")
    busy = sessions.open("")
    turn = sessions.begin(busy, [1], 4, 64)
    await asyncio.sleep(0.06)
    assert sessions.of("") == [busy]
    assert old.closed
    turn.take([3])
    turn.end()
    assert busy.tokens == [1, 3]


async def test_several_gateways_keep_no_sessions() -> None:
    maker = AnswerMaker(Service(FakeFleet(MODEL, says("x")), TEXT, ApiSettings(), num_gateways=2))
    with pytest.raises(InvalidRequest, match="this service has 2"):
        _ = maker.sessions


def test_a_tree_of_forks_takes_the_cells_of_its_distinct_tokens() -> None:
    info = fake_info(num_cells=8192, max_prefill_tokens=512)
    planner = Planner(fake_limits(info, max_batched_tokens=512, prefill_chunk_tokens=512))
    executor, sessions = FakeExecutor(info), Sessions(max_sessions=4096, max_per_account=4096, idle_s=60)

    def generate(session: Any, delta: list[int]) -> None:
        turn = sessions.begin(session, delta, 3, info.context)
        planner.submit(fake_request([*session.tokens, *delta], 3))
        while (step := planner.plan()) is not None:
            executor.launch(step)
            for update in planner.commit(step, executor.collect()):
                turn.take(update.tokens)
        turn.end()

    root = sessions.open("")
    generate(root, list(range(1, 101)))
    level, leaves = [root], [root]
    for depth in range(4):
        level = [sessions.fork(parent, None) for parent in level for _ in range(3)]
        for place, child in enumerate(level):
            generate(child, [200 + 50 * depth + place])
        leaves += level
    distinct = {tuple(one.tokens[: end + 1]) for one in leaves for end in range(one.position)}
    assert planner.snapshot().owned_cells == 0
    assert len(distinct) <= planner.snapshot().cached_cells + len(leaves)
    assert planner.snapshot().cached_cells < 1.1 * len(distinct)


@settings(deadline=None)
@given(st.data())
def test_histories_are_as_a_naive_model_says(data: st.DataObject) -> None:
    sessions = Sessions(max_sessions=99, max_per_account=99, idle_s=60)
    known: dict[str, tuple[list[int], bool]] = {}
    tokens = st.lists(st.integers(0, 9), min_size=1, max_size=4)
    for _ in range(data.draw(st.integers(1, 12))):
        verb = data.draw(st.sampled_from(["open", "extend", "fork", "rewind", "close"])) if known else "open"
        if verb == "open":
            known[sessions.open("").id] = ([], False)
            continue
        chosen = list(known)[data.draw(st.integers(0, len(known) - 1))]
        history, pending = known[chosen]
        session = sessions.get(chosen, "")
        if verb == "extend":
            delta, said = data.draw(tokens), data.draw(st.lists(tokens, max_size=3))
            turn = sessions.begin(session, delta, 4, 10_000)
            for piece in said:
                turn.take(piece)
            turn.end()
            if said:
                known[chosen] = ([*history, *delta, *(token for piece in said for token in piece)], True)
        elif verb == "fork":
            known[sessions.fork(session, None).id] = (list(history), pending)
        elif verb == "rewind":
            at = data.draw(st.integers(0, len(history) - pending))
            known[sessions.fork(session, at).id] = (history[:at], False)
        else:
            sessions.close(session)
            del known[chosen]
    assert {one.id: (one.tokens, one.has_pending) for one in sessions.of("")} == known

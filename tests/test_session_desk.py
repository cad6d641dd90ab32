"""Gateways that share the owner of their sessions: what each hears of the others, and what a lost owner does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from cluster.session_desk import RENEW_S, SessionDesk
from cluster.session_owner import LocalOwner
from cluster.sessions import SessionLimits, Sessions, SessionState, SessionView
from cluster.text import TextModel
from planner.errors import QueueFull, SessionBusy, Unavailable, UnknownSession
from tests.http_desk import TEXT, Desk, RawClient, desk, refusal, says, until
from tests.session_rig import KeeperHandle, remote_owner
from tests.tiny_text import EOS, SPECIALS, tiny_tokenizer

SHORT_LEASE = SessionLimits(max_sessions=4, max_per_account=2, idle_s=600.0, lease_s=0.8)
COMPLETIONS = "/v1/completions"
BOS = 1


@contextlib.asynccontextmanager
async def shut(*desks: SessionDesk) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for each in desks:
            await each.shut()


async def running(d: Desk, session: str) -> asyncio.Task[httpx.Response]:
    """A generation on the session that waits for the fleet's gate."""
    d.fleet.gate.clear()
    task = asyncio.create_task(d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session))
    await until(lambda: d.fleet.num_running == 1)
    return task


async def test_what_one_gateway_generated_another_goes_on_with() -> None:
    handle = KeeperHandle()
    here, there = SessionDesk(remote_owner(handle)), SessionDesk(remote_owner(handle))
    async with shut(here, there):
        session = (await here.open("me")).id
        turn = await here.begin(session, "me", [1, 2], 4, 64)
        assert list(turn.history) == []
        with pytest.raises(SessionBusy):
            await there.begin(session, "me", [3], 4, 64)
        turn.take([7, 8])
        assert await turn.end()
        assert list((await there.begin(session, "me", [3], 4, 64)).history) == [1, 2, 7, 8]


async def test_a_key_has_its_limit_at_all_gateways_together() -> None:
    handle = KeeperHandle(SHORT_LEASE)
    here, there = SessionDesk(remote_owner(handle)), SessionDesk(remote_owner(handle))
    await here.open("me")
    await there.open("me")
    with pytest.raises(QueueFull, match="2 sessions are open; at most 2 may be") as caught:
        await here.open("me")
    assert caught.value.retry_after_s == 600.0


async def test_a_session_stays_busy_while_its_gateway_lives_and_no_longer() -> None:
    handle = KeeperHandle(SHORT_LEASE)
    here, there = SessionDesk(remote_owner(handle)), SessionDesk(remote_owner(handle))
    async with shut(there):
        session = (await here.open("me")).id
        turn = await here.begin(session, "me", [1, 2], 4, 64)
        turn.take([7])
        await asyncio.sleep(1.2)
        assert (await there.get(session, "me")).state is SessionState.BUSY
        await here.shut()  # nobody ended its turn
        await asyncio.sleep(1.0)
        assert (await there.get(session, "me")).state is SessionState.IDLE
        assert list((await there.begin(session, "me", [3], 4, 64)).history) == []


async def test_a_close_at_one_gateway_ends_what_runs_at_another() -> None:
    handle = KeeperHandle()
    here = SessionDesk(remote_owner(handle))
    async with desk(says("hello world"), sessions=remote_owner(handle)) as d:
        session = (await here.open("")).id
        task = await running(d, session)
        await here.close(session, "")
        await asyncio.sleep(RENEW_S * 1.5)
        d.fleet.gate.set()
        assert refusal(await task, 404)["message"] == "session is not open"
        assert d.fleet.num_running == 0
        assert [generation.cancelled for generation in d.fleet.generations] == [{0}]


async def test_a_client_that_leaves_gives_its_session_back_with_what_came() -> None:
    async with desk(says("hello world " * 4), sessions=remote_owner(KeeperHandle())) as d:
        session = (await d.post("/v1/sessions")).json()["id"]
        client = RawClient(d.app, {"prompt": "ab", "max_tokens": 60, "session_id": session, "stream": True})
        task = asyncio.create_task(client.run())
        await client.news.wait()
        d.fleet.gate.clear()
        client.leave.set()
        await task
        card = (await d.http.get(f"/v1/sessions/{session}")).json()
        assert (card["state"], card["has_pending"]) == ("idle", True)
        d.fleet.gate.set()
        await d.post(COMPLETIONS, prompt=[5], max_tokens=2, session_id=session)
        history = [*TEXT.encode("ab"), *TEXT.encode("hello world " * 4)][: card["position"] + 1]
        assert d.fleet.requests[1].prompt.tolist() == [*history, 5]


async def test_who_leaves_while_a_session_is_being_taken_leaves_it_free() -> None:
    handle = KeeperHandle()
    here = SessionDesk(remote_owner(handle))
    async with shut(here):
        session = (await here.open("")).id
        handle.gate.clear()
        beginning = asyncio.create_task(here.begin(session, "", [1], 4, 64))
        await until(lambda: handle.calls[-1] == "begin")
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        handle.gate.set()
        await until(lambda: handle.calls[-1] == "end")
        assert (await here.get(session, "")).state is SessionState.IDLE


async def test_what_was_generated_reaches_an_owner_that_was_away() -> None:
    handle = KeeperHandle()
    here = SessionDesk(remote_owner(handle))
    async with shut(here):
        session = (await here.open("")).id
        turn = await here.begin(session, "", [1], 4, 64)
        turn.take([2])
        handle.is_gone = True
        ending = asyncio.create_task(turn.end())
        await until(lambda: handle.calls.count("end") == 2)
        handle.is_gone = False
        assert await ending
        assert (await here.get(session, "")).position == 1


async def test_sessions_of_an_owner_that_died_are_unknown_and_what_runs_on_them_ends() -> None:
    handle = KeeperHandle()
    async with desk(says("hello world"), sessions=remote_owner(handle)) as d:
        session = (await d.post("/v1/sessions")).json()["id"]
        task = await running(d, session)
        handle.is_gone = True
        for answer in (await d.post("/v1/sessions"), await d.post(COMPLETIONS, prompt="x", session_id=session)):
            assert refusal(answer, 503)["message"] == "the owner of the sessions does not answer: KeeperGoneError"
            assert answer.headers["retry-after"] == "1"
        handle.replace()
        d.fleet.gate.set()
        assert refusal(await task, 404)["code"] == "session_not_found"
        late = await d.post(COMPLETIONS, prompt="x", session_id=session)
        assert refusal(late, 404)["message"] == "session is not open"
        assert (await d.post("/v1/sessions")).status_code == 200


async def test_a_stream_ends_well_only_when_its_session_has_it() -> None:
    handle = KeeperHandle()
    async with desk(says("hi"), sessions=remote_owner(handle)) as d:
        session = (await d.post("/v1/sessions")).json()["id"]
        d.fleet.gate.clear()
        task = asyncio.create_task(d.post(COMPLETIONS, prompt="ab", max_tokens=8, session_id=session, stream=True))
        await until(lambda: d.fleet.num_running == 1)
        handle.replace()  # and the sessions are lost
        d.fleet.gate.set()
        text = (await task).text
        assert '"finish_reason":"stop"' not in text
        assert "session_not_found" in text


async def test_an_owner_that_says_nothing_is_waited_for_a_while() -> None:
    handle = KeeperHandle()
    handle.gate.clear()
    with pytest.raises(Unavailable, match="does not answer: TimeoutError"):
        await remote_owner(handle, patience_s=0.05).open("")


class LateOwner(LocalOwner):
    """Tells of a session as it was before somebody's first generation on it, once."""

    stale: SessionView | None = None

    async def get(self, session_id: str, account: str) -> SessionView:
        stale, self.stale = self.stale, None
        return stale or await super().get(session_id, account)


def beginning_with_a_token() -> TextModel:
    tokenizer = tiny_tokenizer()
    start = SPECIALS[BOS]
    tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, BOS)])
    return TextModel(tokenizer, eos_ids=frozenset({EOS}), chat_template=None)


async def test_a_text_is_the_beginning_of_a_session_only_where_it_is() -> None:
    owner = LateOwner(Sessions(SHORT_LEASE))
    async with desk(says("hi"), text=beginning_with_a_token(), sessions=owner) as d:
        session = (await d.post("/v1/sessions")).json()["id"]
        stale = await owner.get(session, "")
        await d.post(COMPLETIONS, prompt="ab", max_tokens=1, session_id=session)
        first = d.fleet.requests[0].prompt.tolist()
        assert first == [BOS, *TEXT.encode("ab")]
        owner.stale = stale
        assert (await d.post(COMPLETIONS, prompt="ab", max_tokens=1, session_id=session)).status_code == 200
        assert d.fleet.requests[1].prompt.tolist() == [*first, TEXT.encode("hi")[0], *TEXT.encode("ab")]
        assert (await owner.get(session, "")).state is SessionState.IDLE


async def test_a_session_is_unknown_to_another_account() -> None:
    here = SessionDesk(remote_owner(KeeperHandle()))
    session = (await here.open("me")).id
    for asked in (here.get, here.close):
        with pytest.raises(UnknownSession) as caught:
            await asked(session, "you")
        assert caught.value.param == "session_id"

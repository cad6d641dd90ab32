"""Gateways that share the owner of their sessions: what each hears of the others, and what a lost owner does."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from cluster.language.text import TextModel
from cluster.sessions.desk import RENEW_S, SessionDesk
from cluster.sessions.histories import Begun, SessionLimits, Sessions, SessionState, SessionView
from cluster.sessions.owner import LocalOwner
from planner.errors import QueueFull, SessionBusy, Unavailable, UnknownSession
from tests.http_desk import TEXT, Desk, RawClient, desk, refusal, says, until
from tests.session_rig import LIMITS, keeper
from tests.tiny_text import EOS, SPECIALS, tiny_tokenizer

SHORT_LEASE = SessionLimits(max_sessions=4, max_per_account=2, idle_s=600.0, lease_s=0.8)
COMPLETIONS = "/v1/completions"
BOS = 1


@asynccontextmanager
async def desks(limits: SessionLimits = LIMITS) -> AsyncIterator[tuple[SessionDesk, SessionDesk]]:
    """Of two gateways."""
    async with keeper(limits) as kept:
        here, there = SessionDesk(kept.owner()), SessionDesk(kept.owner())
        yield here, there
        await here.shut()
        await there.shut()


async def running(d: Desk, session: str) -> asyncio.Task[httpx.Response]:
    """A generation on the session that waits for the fleet's gate."""
    d.fleet.gate.clear()
    task = asyncio.create_task(d.post(COMPLETIONS, prompt="hello", max_tokens=8, session_id=session))
    await until(lambda: d.fleet.num_running == 1)
    return task


async def test_what_one_gateway_generated_another_goes_on_with() -> None:
    async with desks() as (here, there):
        session = (await here.open("me")).id
        turn = await here.begin(session, "me", [1, 2], 4, 64)
        assert list(turn.history) == []
        with pytest.raises(SessionBusy):
            await there.begin(session, "me", [3], 4, 64)
        turn.take([7, 8])
        assert await turn.end()
        following = await there.begin(session, "me", [3], 4, 64)
        assert list(following.history) == [1, 2, 7, 8]


async def test_a_key_has_its_limit_at_all_gateways_together() -> None:
    async with desks(SHORT_LEASE) as (here, there):
        await here.open("me")
        await there.open("me")
        with pytest.raises(QueueFull, match="2 sessions are open; at most 2 may be") as caught:
            await here.open("me")
        assert caught.value.retry_after_s == 600.0


async def test_a_session_stays_busy_while_its_gateway_lives_and_no_longer() -> None:
    async with desks(SHORT_LEASE) as (here, there):
        session = (await here.open("me")).id
        turn = await here.begin(session, "me", [1, 2], 4, 64)
        turn.take([7])
        await asyncio.sleep(1.2)
        assert (await there.get(session, "me")).state is SessionState.BUSY
        await here.shut()  # nobody ended its turn
        await asyncio.sleep(1.0)
        assert (await there.get(session, "me")).state is SessionState.IDLE
        assert list((await there.begin(session, "me", [3], 4, 64)).history) == []


async def test_a_turn_that_was_lost_without_an_end_keeps_nobody_out_for_long() -> None:
    async with desks(SHORT_LEASE) as (here, there):
        session = (await here.open("me")).id
        await here.begin(session, "me", [1, 2], 4, 64)
        gc.collect()
        await asyncio.sleep(1.0)
        assert (await there.get(session, "me")).state is SessionState.IDLE


async def test_a_close_at_one_gateway_ends_what_runs_at_another() -> None:
    async with keeper() as kept, desk(says("hello world"), sessions=kept.owner()) as d:
        here = SessionDesk(kept.owner())
        session = (await here.open("")).id
        task = await running(d, session)
        await here.close(session, "")
        await asyncio.sleep(RENEW_S * 1.5)
        d.fleet.gate.set()
        assert refusal(await task, 404)["message"] == "session is not open"
        assert d.fleet.num_running == 0
        assert [generation.cancelled for generation in d.fleet.generations] == [{0}]


async def test_a_client_that_leaves_gives_its_session_back_with_what_came() -> None:
    async with keeper() as kept, desk(says("hello world " * 4), sessions=kept.owner()) as d:
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


class SlowOwner(LocalOwner):
    """Says that a session is taken only when `gate` is open."""

    def __init__(self) -> None:
        super().__init__(Sessions(LIMITS))
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Begun:
        begun = await super().begin(session_id, account, delta, max_tokens, context)
        self.begun.set()
        await self.gate.wait()
        return begun

    async def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        self.ended.set()
        return await super().end(turn_id, generated, failed=failed)


async def test_who_leaves_while_a_session_is_being_taken_leaves_it_free() -> None:
    owner = SlowOwner()
    here = SessionDesk(owner)
    session = (await here.open("")).id
    beginning = asyncio.create_task(here.begin(session, "", [1], 4, 64))
    await owner.begun.wait()
    beginning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await beginning
    assert (await here.get(session, "")).state is SessionState.BUSY
    owner.gate.set()
    await owner.ended.wait()
    assert (await here.get(session, "")).state is SessionState.IDLE
    await here.shut()


async def test_what_was_generated_reaches_an_owner_that_was_away() -> None:
    async with keeper() as kept:
        here = SessionDesk(kept.owner())
        session = (await here.open("")).id
        turn = await here.begin(session, "", [1], 4, 64)
        turn.take([2])
        await kept.stop()
        ending = asyncio.create_task(turn.end())
        await asyncio.wait([ending], timeout=0.5)
        assert not ending.done()
        await kept.start()
        assert await ending
        assert (await here.get(session, "")).position == 1
        await here.shut()


async def test_sessions_of_an_owner_that_died_are_unknown_and_what_runs_on_them_ends() -> None:
    async with keeper() as kept, desk(says("hello world"), sessions=kept.owner()) as d:
        session = (await d.post("/v1/sessions")).json()["id"]
        task = await running(d, session)
        await kept.stop()
        for answer in (await d.post("/v1/sessions"), await d.post(COMPLETIONS, prompt="x", session_id=session)):
            assert refusal(answer, 503)["message"] == "the owner of the sessions does not answer: UNAVAILABLE"
            assert answer.headers["retry-after"] == "1"
        await kept.replace()
        d.fleet.gate.set()
        assert refusal(await task, 404)["code"] == "session_not_found"
        late = await d.post(COMPLETIONS, prompt="x", session_id=session)
        assert refusal(late, 404)["message"] == "session is not open"
        assert (await d.post("/v1/sessions")).status_code == 200


async def test_a_stream_ends_well_only_when_its_session_has_it() -> None:
    async with keeper() as kept, desk(says("hi"), sessions=kept.owner()) as d:
        session = (await d.post("/v1/sessions")).json()["id"]
        d.fleet.gate.clear()
        task = asyncio.create_task(d.post(COMPLETIONS, prompt="ab", max_tokens=8, session_id=session, stream=True))
        await until(lambda: d.fleet.num_running == 1)
        await kept.replace()  # and the sessions are lost
        d.fleet.gate.set()
        text = (await task).text
        assert '"finish_reason":"stop"' not in text
        assert "session_not_found" in text


async def test_an_owner_that_is_not_there_yet_is_waited_for_a_while() -> None:
    async with keeper() as kept:
        owner = kept.owner(patience_s=0.2)
        owner.set_address(None)
        with pytest.raises(Unavailable, match=r"did not answer in 0\.2 s"):
            await owner.open("")
        opening = asyncio.create_task(owner.open(""))
        await asyncio.sleep(0.05)
        owner.set_address(kept.address)
        assert (await opening).is_empty


async def test_whoever_lacks_the_secret_is_told_nothing() -> None:
    async with keeper() as kept:
        with pytest.raises(Unavailable, match="UNAUTHENTICATED"):
            await kept.owner(secret="another").of("")


async def test_a_session_is_unknown_to_another_account() -> None:
    async with desks() as (here, _):
        session = (await here.open("me")).id
        for asked in (here.get, here.close):
            with pytest.raises(UnknownSession) as caught:
                await asked(session, "you")
            assert caught.value.param == "session_id"


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

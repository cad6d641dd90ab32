"""Sessions over gRPC: the same as over HTTP, and the same sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from cluster.sessions.histories import Sessions
from cluster.sessions.owner import LocalOwner
from planner.errors import ForwardFailed
from protos import inference_pb2 as pb
from tests.grpc_desk import GrpcDesk, failure, grpc_desk, ids_of, trailer
from tests.http_desk import TEXT, desk, says, until
from tests.session_rig import LIMITS
from tests.tiny_text import EOS


async def opened(client: GrpcDesk) -> str:
    session: pb.Session = await client.inference.OpenSession(pb.OpenSessionRequest())
    return session.id


async def got(client: GrpcDesk, session: str) -> pb.Session:
    told: pb.Session = await client.inference.GetSession(pb.GetSessionRequest(session_id=session))
    return told


async def refused(asked: Awaitable[Any]) -> tuple[str, str, str | None]:
    """Status, details and stable name of a failure."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked
    error = caught.value
    return error.code().name, str(error.details()), trailer(error, "error-code")


async def test_a_session_goes_on_with_everything_that_was_said() -> None:
    async with grpc_desk(says("hi", "yes")) as client:
        session = await opened(client)
        fresh = await got(client, session)
        assert (fresh.model, fresh.position, fresh.state) == ("tiny", 0, pb.SESSION_STATE_IDLE)
        messages = await client.generate(prompt="hello", session_id=session, max_tokens=4)
        history = [*TEXT.encode("hello"), *ids_of(messages)]
        assert history[-1] == EOS
        told = await got(client, session)
        assert (told.position, told.has_pending) == (len(history) - 1, True)
        await client.generate(ids=[5, 6], session_id=session, max_tokens=4)
        assert client.fleet.requests[1].prompt.tolist() == [*history, 5, 6]


async def test_forks_are_listed_and_closed() -> None:
    async with grpc_desk(says("hi", "yes")) as client:
        session = await opened(client)
        await client.generate(prompt="hello", session_id=session, max_tokens=4)
        position = (await got(client, session)).position
        whole = await client.inference.ForkSession(pb.ForkSessionRequest(session_id=session))
        empty = await client.inference.ForkSession(pb.ForkSessionRequest(session_id=session, at=0))
        assert [(one.position, one.has_pending) for one in (whole, empty)] == [(position, True), (0, False)]
        listed = await client.inference.ListSessions(pb.ListSessionsRequest())
        assert {one.id for one in listed.sessions} == {session, whole.id, empty.id}
        await client.inference.CloseSession(pb.CloseSessionRequest(session_id=whole.id))
        listed = await client.inference.ListSessions(pb.ListSessionsRequest())
        assert {one.id for one in listed.sessions} == {session, empty.id}
        assert await refused(got(client, whole.id)) == ("NOT_FOUND", "session is not open", "session_not_found")
        beyond = client.inference.ForkSession(pb.ForkSessionRequest(session_id=session, at=position + 1))
        code, details, _ = await refused(beyond)
        assert (code, details.partition(":")[0]) == ("INVALID_ARGUMENT", "session position is invalid")


async def test_what_http_opened_grpc_goes_on_with() -> None:
    owner = LocalOwner(Sessions(LIMITS))
    async with desk(says("hi"), sessions=owner) as http, grpc_desk(says("yes"), sessions=owner) as client:
        session = (await http.post("/v1/sessions")).json()["id"]
        await http.post("/v1/completions", prompt="hello", max_tokens=4, session_id=session)
        await client.generate(ids=[5], session_id=session, max_tokens=4)
        assert client.fleet.requests[0].prompt.tolist() == [*TEXT.encode("hello"), *TEXT.encode("hi"), EOS, 5]
        card = (await http.http.get(f"/v1/sessions/{session}")).json()
        assert card["position"] == (await got(client, session)).position


async def test_a_busy_a_failed_and_a_foreign_session_are_refused() -> None:
    async with grpc_desk(says("hello world"), api_keys=("one", "two")) as client:
        mine, theirs = ([("authorization", f"Bearer {key}")] for key in ("one", "two"))
        session = (await client.inference.OpenSession(pb.OpenSessionRequest(), metadata=mine)).id
        asked = pb.GetSessionRequest(session_id=session)
        assert (await refused(client.inference.GetSession(asked, metadata=theirs)))[0] == "NOT_FOUND"
        assert (await refused(client.inference.GetSession(asked)))[0] == "UNAUTHENTICATED"
        client.fleet.gate.clear()
        running = asyncio.create_task(client.generate(mine, session_id=session, max_tokens=8))
        await until(lambda: client.fleet.num_running == 1)
        error = await failure(client, mine, session_id=session, max_tokens=8)
        assert (error.code(), trailer(error, "error-code")) == (grpc.StatusCode.FAILED_PRECONDITION, "session_busy")
        client.fleet.fail_after = (1, ForwardFailed("it broke"))
        client.fleet.gate.set()
        with pytest.raises(grpc.aio.AioRpcError):
            await running
        error = await failure(client, mine, session_id=session, max_tokens=8)
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert error.details() == "session cannot continue after an executor failure"
        told: pb.Session = await client.inference.GetSession(asked, metadata=mine)
        assert told.state == pb.SESSION_STATE_FAILED


async def test_a_call_that_is_cancelled_gives_its_session_back() -> None:
    async with grpc_desk(says("hello world")) as client:
        session = await opened(client)
        client.fleet.gate.clear()
        running = asyncio.create_task(client.generate(session_id=session, max_tokens=8))
        await until(lambda: client.fleet.num_running == 1)
        assert (await got(client, session)).state == pb.SESSION_STATE_BUSY
        running.cancel()
        async with asyncio.timeout(5):
            while (await got(client, session)).state != pb.SESSION_STATE_IDLE:  # noqa: ASYNC110 - the service tells nobody
                await asyncio.sleep(0.01)
        assert client.fleet.num_running == 0


async def test_a_conversation_is_its_own_history() -> None:
    async with grpc_desk() as client:
        error = await failure(client, messages=[("user", "hello")], session_id=await opened(client))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert trailer(error, "error-param") == "session_id"


async def test_an_unknown_model_opens_no_session() -> None:
    async with grpc_desk() as client:
        asked = client.inference.OpenSession(pb.OpenSessionRequest(model="other"))
        assert (await refused(asked))[2] == "model_not_found"
        assert not (await client.inference.ListSessions(pb.ListSessionsRequest())).sessions

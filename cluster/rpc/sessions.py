"""The RPCs of sessions: what the HTTP endpoints of `cluster.web.session_api` do, in messages."""

from __future__ import annotations

from typing import Final

from cluster.answers.maker import AnswerMaker
from cluster.models import Models
from cluster.rpc.calls import Caller, Calls
from cluster.rpc.conversation import refuse_unknown
from cluster.rpc.status import Call
from cluster.sessions.histories import SessionState, SessionView
from protos import inference_pb2 as pb

_STATES: Final = {
    SessionState.IDLE: pb.SESSION_STATE_IDLE,
    SessionState.BUSY: pb.SESSION_STATE_BUSY,
    SessionState.FAILED: pb.SESSION_STATE_FAILED,
}


class GrpcSessions:
    """One method an RPC; each tells its failures through `call`. Owner: the gRPC service."""

    def __init__(self, models: Models, calls: Calls) -> None:
        self._models = models
        self._calls = calls

    async def open(self, request: pb.OpenSessionRequest, call: Call) -> pb.Session:
        async def work(caller: Caller) -> pb.Session:
            refuse_unknown(request)
            asked = request.model if request.HasField("model") else None
            maker = self._models.of(asked)
            maker.model(asked)
            return _told(maker, await maker.sessions.open(caller.account))

        return await self._calls.unary(request, call, work, pb.Session())

    async def get(self, request: pb.GetSessionRequest, call: Call) -> pb.Session:
        async def work(caller: Caller) -> pb.Session:
            refuse_unknown(request)
            maker = await self._models.of_session(None, request.session_id, caller.account)
            return _told(maker, await maker.sessions.get(request.session_id, caller.account))

        return await self._calls.unary(request, call, work, pb.Session())

    async def list(self, request: pb.ListSessionsRequest, call: Call) -> pb.ListSessionsResponse:
        async def work(caller: Caller) -> pb.ListSessionsResponse:
            refuse_unknown(request)
            told = [
                _told(maker, session)
                for maker in self._models.known
                for session in await maker.sessions.of(caller.account)
            ]
            return pb.ListSessionsResponse(sessions=told)

        return await self._calls.unary(request, call, work, pb.ListSessionsResponse())

    async def fork(self, request: pb.ForkSessionRequest, call: Call) -> pb.Session:
        async def work(caller: Caller) -> pb.Session:
            refuse_unknown(request)
            at = request.at if request.HasField("at") else None
            maker = await self._models.of_session(None, request.session_id, caller.account)
            return _told(maker, await maker.sessions.fork(request.session_id, caller.account, at))

        return await self._calls.unary(request, call, work, pb.Session())

    async def close(self, request: pb.CloseSessionRequest, call: Call) -> pb.CloseSessionResponse:
        async def work(caller: Caller) -> pb.CloseSessionResponse:
            refuse_unknown(request)
            maker = await self._models.of_session(None, request.session_id, caller.account)
            await maker.sessions.close(request.session_id, caller.account)
            return pb.CloseSessionResponse()

        return await self._calls.unary(request, call, work, pb.CloseSessionResponse())


def _told(maker: AnswerMaker, session: SessionView) -> pb.Session:
    return pb.Session(
        id=session.id,
        created=session.created,
        model=maker.names()[0],
        state=_STATES[session.state],
        position=session.position,
        has_pending=session.has_pending,
    )

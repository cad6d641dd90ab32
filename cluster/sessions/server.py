"""The owner of a service's sessions, where gateways reach it: a gRPC server over `Sessions`. Free of Ray."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import grpc.aio

from cluster.sessions.histories import Sessions
from cluster.sessions.wire import begun_to_proto, session_to_proto
from planner.errors import InvalidRequest, RequestRefused
from protos import sessions_pb2 as pb
from protos import sessions_pb2_grpc
from worker.listening import listen
from worker.wire import SECRET_METADATA, SERVER_OPTIONS, error_to_proto, knows_secret

logger = logging.getLogger(__name__)

Context = Any  # grpc.aio.ServicerContext[pb.Question, pb.Answer]; grpc ships no types


class SessionServer:
    """Owner: a keeper, on its event loop. Its questions are answered one at a time, each at once."""

    def __init__(
        self, sessions: Sessions, secret: str, host: str, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        """`host` is the address to bind, that gateways reach. Without `credentials` it speaks plaintext."""
        self._answers = _Answers(sessions, secret)
        self._host = f"[{host}]" if ":" in host else host
        self._credentials = credentials
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Listen at a free port; gives the "host:port"."""
        server = grpc.aio.server(options=SERVER_OPTIONS)
        sessions_pb2_grpc.add_SessionKeeperServicer_to_server(self._answers, server)
        address = await listen(server, self._host, 0, self._credentials)
        self._server = server
        return address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)


class _Answers(sessions_pb2_grpc.SessionKeeperServicer):
    def __init__(self, sessions: Sessions, secret: str) -> None:
        self._sessions = sessions
        self._secret = secret.encode()

    async def Ask(self, question: pb.Question, context: Context) -> pb.Answer:  # noqa: N802 - gRPC's name
        if not knows_secret(context.invocation_metadata(), self._secret):
            logger.warning("refused a question from %s: it lacks the secret", context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{SECRET_METADATA} is missing or wrong")
        try:
            return self._answer(question, self._sessions)
        except RequestRefused as refusal:
            return pb.Answer(refusal=error_to_proto(refusal))

    def _answer(self, question: pb.Question, sessions: Sessions) -> pb.Answer:
        account = question.account
        match question.WhichOneof("question"):
            case "open":
                return pb.Answer(session=session_to_proto(sessions.open(account)))
            case "get":
                return pb.Answer(session=session_to_proto(sessions.get(question.get, account)))
            case "list":
                told = [session_to_proto(session) for session in sessions.of(account)]
                return pb.Answer(sessions=pb.Sessions(sessions=told))
            case "fork":
                at = question.fork.at if question.fork.HasField("at") else None
                return pb.Answer(session=session_to_proto(sessions.fork(question.fork.session_id, account, at)))
            case "close":
                sessions.close(question.close, account)
                return pb.Answer(closed=pb.Closed())
            case "begin":
                begin = question.begin
                budget = begin.max_tokens if begin.HasField("max_tokens") else None
                begun = sessions.begin(begin.session_id, account, begin.delta, budget, begin.context)
                return pb.Answer(begun=begun_to_proto(begun))
            case "renew":
                return pb.Answer(lost=pb.Lost(turn_ids=sessions.renew(question.renew.turn_ids)))
            case "end":
                end = question.end
                return pb.Answer(kept=sessions.end(end.turn_id, end.generated, failed=end.failed))
        raise InvalidRequest("the question is not one that this owner of sessions knows")

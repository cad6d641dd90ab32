"""The HTTP endpoints of sessions, and how a completion says which session it goes on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from cluster.answers.maker import AnswerMaker
from cluster.models import Models
from cluster.sessions.histories import SessionView
from cluster.web.answer_response import json_response
from cluster.web.bodies import parse_object, read_body, validate
from cluster.web.routes import add_routes
from planner.errors import InvalidRequest
from protos import openai_answers as wire
from protos.openai import CompletionBody
from protos.openai_sessions import ForkBody, OpenBody

SESSION: str = "x-session-id"
Account = Callable[[Request], str]
B = TypeVar("B", bound=BaseModel)


def named_session(request: Request, body: CompletionBody) -> str | None:
    """The session that a completion goes on with; header and field may both name it, if they agree."""
    given = request.headers.get(SESSION)
    if given is not None and body.session_id not in (None, given):
        raise InvalidRequest(f"{SESSION} and session_id name different sessions", param="session_id")
    return body.session_id if given is None else given


def refuse_session(request: Request) -> None:
    """For endpoints that would ignore it. Raises `InvalidRequest`."""
    if SESSION in request.headers:
        raise InvalidRequest(f"{SESSION} is for /v1/completions: a chat's history is its messages", param=SESSION)


def add_session_routes(app: FastAPI, models: Models, account: Account) -> None:
    endpoints = _Endpoints(models, account)
    add_routes(
        app,
        (
            ("/v1/sessions", "POST", endpoints.open),
            ("/v1/sessions", "GET", endpoints.list),
            ("/v1/sessions/{session_id}", "GET", endpoints.one),
            ("/v1/sessions/{session_id}", "DELETE", endpoints.close),
            ("/v1/sessions/{session_id}/fork", "POST", endpoints.fork),
        ),
    )


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, models: Models, account: Account) -> None:
        self._models = models
        self._account = account

    async def open(self, request: Request) -> Response:
        body = await self._body(request, OpenBody)
        maker = self._models.of(body.model)
        maker.model(body.model)
        return _card(maker, await maker.sessions.open(self._account(request)))

    async def list(self, request: Request) -> Response:
        account = self._account(request)
        cards = [_of(maker, session) for maker in self._models.known for session in await maker.sessions.of(account)]
        return json_response(wire.SessionList(object="list", data=cards).model_dump_json().encode())

    async def one(self, request: Request, session_id: str) -> Response:
        maker, account = await self._maker_of(request, session_id)
        return _card(maker, await maker.sessions.get(session_id, account))

    async def fork(self, request: Request, session_id: str) -> Response:
        body = await self._body(request, ForkBody)
        maker, account = await self._maker_of(request, session_id)
        return _card(maker, await maker.sessions.fork(session_id, account, body.at))

    async def close(self, request: Request, session_id: str) -> Response:
        maker, account = await self._maker_of(request, session_id)
        await maker.sessions.close(session_id, account)
        gone = wire.SessionDeleted(id=session_id, object="session.deleted", deleted=True)
        return json_response(gone.model_dump_json().encode())

    async def _body(self, request: Request, kind: type[B]) -> B:
        """What is not sent is an empty one. Raises `InvalidRequest`."""
        front = self._models.first
        settings = front.service.settings
        data = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        return await front.threads.run(
            len(data) // 16, lambda: validate(kind, parse_object(data) if data.strip() else {})
        )

    async def _maker_of(self, request: Request, session_id: str) -> tuple[AnswerMaker, str]:
        """That of the session's model, and whose request it is."""
        account = self._account(request)
        return await self._models.of_session(None, session_id, account), account


def _card(maker: AnswerMaker, session: SessionView) -> Response:
    return json_response(_of(maker, session).model_dump_json().encode())


def _of(maker: AnswerMaker, session: SessionView) -> wire.SessionCard:
    return wire.SessionCard(
        id=session.id,
        object="session",
        created=session.created,
        model=maker.names()[0],
        state=session.state.value,
        position=session.position,
        has_pending=session.has_pending,
    )

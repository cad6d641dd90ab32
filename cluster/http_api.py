"""The OpenAI-compatible HTTP endpoints, as an ASGI application over a fleet. Knows nothing of Ray.

A request is read, validated, turned into tokens and checked here, before anything is sent to a worker; then an
`AnswerResponse` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from cluster.answer_maker import AnswerMaker
from cluster.answer_response import AnswerResponse, Delivery, error_response, json_response
from cluster.batch_api import Batches, add_batch_routes
from cluster.bodies import parse_object, read_body, validate
from cluster.debug_api import DebugApi
from cluster.embedding_api import add_embedding_route
from cluster.errors import error_envelope
from cluster.file_api import add_file_routes
from cluster.headers import DEADLINE, REQUEST_ID, TENANT, Terms
from cluster.http_guard import Guard
from cluster.metrics_page import exposition
from cluster.page_files import page_files
from cluster.request_record import RECORD
from cluster.response_api import add_response_route
from cluster.routes import add_routes
from cluster.service_metrics import METRICS, metric_sources
from cluster.session_api import add_session_routes, named_session, refuse_session
from cluster.tellings import chat_telling, completion_telling
from planner.errors import RaycombError, Unavailable
from protos import openai_answers as wire
from protos.openai import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeChatBody,
    TokenizeTextBody,
)

B = TypeVar("B")


def create_app(maker: AnswerMaker, batches: Batches | None = None, *, tells_request_id: bool = True) -> FastAPI:
    """The application. Make it inside the running process: it keeps state that belongs to one event loop.

    `batches`: None where the service keeps no files and batches.

    `tells_request_id`: False where the server around it adds the header to answers itself, as Ray Serve does.
    """
    settings = maker.service.settings
    page = page_files()
    app = FastAPI(
        title="Raycomb",
        version=settings.version,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(
        Guard,
        keys=maker.keys,
        open_paths=settings.open_paths | page.keys(),
        tells_id=tells_request_id,
        meter=maker.service.meter,
        records=maker.records,
    )
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "retry-after"],
    )
    app.add_exception_handler(RaycombError, _explain_error)
    app.add_exception_handler(HTTPException, _explain_http)
    endpoints = _Endpoints(maker)
    debug = DebugApi(maker.service)
    add_routes(
        app,
        (
            ("/v1/completions", "POST", endpoints.completions),
            ("/v1/chat/completions", "POST", endpoints.chat_completions),
            ("/v1/models", "GET", endpoints.models),
            ("/v1/models/{name:path}", "GET", endpoints.one_model),
            ("/tokenize", "POST", endpoints.tokenize),
            ("/detokenize", "POST", endpoints.detokenize),
            ("/health", "GET", endpoints.health),
            ("/ready", "GET", endpoints.ready),
            ("/version", "GET", endpoints.version),
            ("/metrics", "GET", endpoints.metrics),
            ("/debug/kv", "GET", debug.kv),
            ("/debug/plan", "GET", debug.plan),
            ("/debug/fleet", "GET", debug.fleet),
        ),
    )
    add_session_routes(app, maker, endpoints.account)
    add_file_routes(app, maker, batches, endpoints.account)
    add_batch_routes(app, maker, batches, endpoints.account)
    add_embedding_route(app, maker, endpoints.read, endpoints.terms)
    add_response_route(app, maker, endpoints.read, endpoints.terms)
    for path, file in page.items():
        app.add_route(path, file.__call__, methods=["GET"])
    return app


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, maker: AnswerMaker) -> None:
        self._maker = maker
        self._fleet = maker.service.fleet
        self._meter = maker.service.meter
        self._tokens = maker.service.text.tokens
        self._settings = maker.service.settings

    async def completions(self, request: Request) -> Response:
        with self._meter.admission():
            agreed = self.terms(request)
            body = await self.read(request, lambda value: validate(CompletionBody, value))
            session_id = named_session(request, body)
            if session_id is None:
                answer, name = await self._maker.completion(body, agreed)
            else:
                answer, name = await self._maker.extension(body, session_id, self.account(request), agreed)
        return AnswerResponse(answer, completion_telling(self._maker, body, answer, name), self._delivery(agreed, body))

    async def chat_completions(self, request: Request) -> Response:
        with self._meter.admission():
            refuse_session(request)
            agreed = self.terms(request)
            body = await self.read(request, lambda value: validate(ChatBody, value))
            answer, name, new_reader = await self._maker.chat(body, agreed)
        telling = chat_telling(self._maker, body, answer, name, new_reader)
        return AnswerResponse(answer, telling, self._delivery(agreed, body))

    async def models(self) -> Response:
        return _json(wire.ModelList(object="list", data=self._cards()))

    async def one_model(self, name: str) -> Response:
        self._maker.model(name)
        return _json(next(card for card in self._cards() if card.id == name))

    async def tokenize(self, request: Request) -> Response:
        body = await self.read(request, _tokenize_body)
        model, _ = self._maker.model(body.model)
        ids = await self._maker.token_ids(body)
        names = [self._tokens.name(token) for token in ids] if body.return_token_strs else None
        return _json(wire.Tokenized(count=len(ids), max_model_len=model.context, tokens=ids, token_strs=names))

    async def detokenize(self, request: Request) -> Response:
        body = await self.read(request, lambda value: validate(DetokenizeBody, value))
        return _json(wire.Detokenized(prompt=await self._maker.decoded(body)))

    async def health(self) -> Response:
        """Alive, and has been able to serve: a process that still waits for its first worker is starting."""
        return self._state("ok" if self._fleet.model is not None else None)

    async def ready(self) -> Response:
        return self._state("ready" if self._fleet.ready else None)

    async def version(self) -> Response:
        return json_response(json.dumps({"version": self._settings.version}).encode())

    async def metrics(self, request: Request) -> Response:
        page, content_type = exposition(metric_sources(self._maker.service), METRICS, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    def _state(self, word: str | None) -> Response:
        if word is None:
            return error_response(Unavailable("no worker can serve"))
        return json_response(json.dumps({"status": word}).encode())

    async def read(self, request: Request, validated: Callable[[dict[str, Any]], B]) -> B:
        """The body. Raises `InvalidRequest`."""
        data = await read_body(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        return await self._maker.threads.run(len(data) // 16, lambda: validated(parse_object(data)))

    def _cards(self) -> list[wire.ModelCard]:
        model = self._maker.served()
        return [
            wire.ModelCard(
                id=name, object="model", created=model.created, owned_by="raycomb", max_model_len=model.context
            )
            for name in self._maker.names()
        ]

    def terms(self, request: Request) -> Terms:
        """What the headers say. Raises `InvalidRequest`."""
        headers = request.headers
        key = self._maker.keys.find(headers.get("authorization", ""))
        return self._maker.terms(headers.getlist(DEADLINE), headers.getlist(TENANT), key, request.scope.get(RECORD))

    def account(self, request: Request) -> str:
        """Whose request it is: its key's, where the service has keys."""
        key = self._maker.keys.find(request.headers.get("authorization", ""))
        return "" if key is None else key.tenant

    def _delivery(self, agreed: Terms, body: GenerationBody) -> Delivery:
        return Delivery(stream=body.stream, keepalive_s=self._settings.keepalive_s, terms=agreed)


def _tokenize_body(value: dict[str, Any]) -> TokenizeTextBody | TokenizeChatBody:
    if value.get("messages") is None:
        return validate(TokenizeTextBody, value)
    return validate(TokenizeChatBody, value)


def _json(answer: wire.Answer) -> Response:
    return json_response(answer.model_dump_json().encode())


async def _explain_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaycombError)
    if (record := request.scope.get(RECORD)) is not None:
        record.note_failure(error)
    return error_response(error)


async def _explain_http(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the same envelope; an Allow header is kept."""
    assert isinstance(error, HTTPException)
    told = {404: ("not_found", "there is no"), 405: ("method_not_allowed", "the method does not fit")}
    code, words = told.get(error.status_code, ("http_error", error.detail))
    value = error_envelope(f"{words}: {request.method} {request.url.path}", "invalid_request_error", code=code)
    headers = dict(error.headers or {})
    return json_response(json.dumps(value).encode(), error.status_code, headers)

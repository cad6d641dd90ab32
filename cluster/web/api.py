"""The OpenAI-compatible HTTP endpoints, as an ASGI application over a fleet. Knows nothing of Ray.

A request is read, validated, turned into tokens and checked here, before anything is sent to a worker; then an
`AnswerResponse` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from cluster.adapters.api import add_adapter_routes
from cluster.answers.maker import AnswerMaker
from cluster.batches.api import Batches, add_batch_routes
from cluster.batches.file_api import add_file_routes
from cluster.errors import error_envelope
from cluster.headers import DEADLINE, REQUEST_ID, TENANT, Terms
from cluster.models import Models
from cluster.telemetry.metrics_page import exposition
from cluster.telemetry.request_record import RECORD
from cluster.telemetry.service_metrics import METRICS, metric_sources
from cluster.version import VERSION
from cluster.web.answer_response import AnswerResponse, Delivery, error_response, json_response
from cluster.web.bodies import parse_object, read_body, validate
from cluster.web.debug_api import DebugApi
from cluster.web.embedding_api import add_embedding_route
from cluster.web.guard import Guard
from cluster.web.page_files import page_files
from cluster.web.response_api import add_response_route
from cluster.web.routes import add_routes, allowed_methods
from cluster.web.session_api import add_session_routes, named_session, refuse_session
from cluster.web.tellings import chat_telling, completion_telling
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


def create_app(models: Models, batches: Batches | None = None, *, tells_request_id: bool = True) -> FastAPI:
    """The application. Make it inside the running process: it keeps state that belongs to one event loop.

    `batches`: None where the service keeps no files and batches.

    `tells_request_id`: False where the server around it adds the header to answers itself, as Ray Serve does.
    """
    front, page = models.first, page_files()
    app = _guarded_app(front, page.keys(), tells_request_id=tells_request_id)
    endpoints = _Endpoints(models)
    debug = DebugApi(models.services)
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
    add_session_routes(app, models, endpoints.account)
    add_file_routes(app, front, batches, endpoints.account)
    add_batch_routes(app, front, batches, endpoints.account)
    add_embedding_route(app, models, endpoints.read, endpoints.terms)
    add_response_route(app, models, endpoints.read, endpoints.terms)
    add_adapter_routes(app, models)
    for path, file in page.items():
        app.add_route(path, file.__call__, methods=["GET"])
    return app


def _guarded_app(front: AnswerMaker, pages: Set[str], *, tells_request_id: bool) -> FastAPI:
    """Without endpoints yet: who may come in, and how errors are told. `pages` are open to all."""
    settings = front.service.settings
    app = FastAPI(
        title="Raycomb",
        version=VERSION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(
        Guard,
        keys=front.keys,
        open_paths=settings.open_paths | pages,
        tells_id=tells_request_id,
        meter=front.service.meter,
        records=front.records,
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
    return app


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._front = models.first
        self._meter = models.first.service.meter
        self._settings = models.first.service.settings

    async def completions(self, request: Request) -> Response:
        with self._meter.admission():
            agreed = self.terms(request)
            body = await self.read(request, lambda value: validate(CompletionBody, value))
            session_id, account = named_session(request, body), self.account(request)
            maker = await self._models.of_session(body.model, session_id, account)
        with maker.service.meter.admission():
            if session_id is None:
                answer, name = await maker.completion(body, agreed)
            else:
                answer, name = await maker.extension(body, session_id, account, agreed)
        return AnswerResponse(answer, completion_telling(maker, body, answer, name), self._delivery(agreed, body))

    async def chat_completions(self, request: Request) -> Response:
        with self._meter.admission():
            refuse_session(request)
            agreed = self.terms(request)
            body = await self.read(request, lambda value: validate(ChatBody, value))
            maker = self._models.of(body.model)
        with maker.service.meter.admission():
            answer, name, new_reader = await maker.chat(body, agreed)
        telling = chat_telling(maker, body, answer, name, new_reader)
        return AnswerResponse(answer, telling, self._delivery(agreed, body))

    async def models(self) -> Response:
        cards = [card for maker in self._models.known for card in _cards(maker)]
        return _json(wire.ModelList(object="list", data=cards))

    async def one_model(self, name: str) -> Response:
        maker = self._models.of(name)
        maker.model(name)
        return _json(next(card for card in _cards(maker) if card.id == name))

    async def tokenize(self, request: Request) -> Response:
        body = await self.read(request, _tokenize_body)
        maker = self._models.of(body.model)
        model, tokens = maker.model(body.model).model, maker.service.text.tokens
        ids = await maker.token_ids(body)

        def write() -> Response:
            names = [tokens.name(token) for token in ids] if body.return_token_strs else None
            return _json(wire.Tokenized(count=len(ids), max_model_len=model.context, tokens=ids, token_strs=names))

        return await maker.threads.run_admitted(len(ids), write)

    async def detokenize(self, request: Request) -> Response:
        body = await self.read(request, lambda value: validate(DetokenizeBody, value))
        return _json(wire.Detokenized(prompt=await self._models.of(body.model).decoded(body)))

    async def health(self) -> Response:
        """Alive, and has been able to serve: a process that still waits for a model's first worker is starting."""
        return self._state("ok" if self._models.have_served else None)

    async def ready(self) -> Response:
        return self._state("ready" if self._models.ready else None)

    async def version(self) -> Response:
        return json_response(json.dumps({"version": VERSION}).encode())

    async def metrics(self, request: Request) -> Response:
        sources = [source for service in self._models.services for source in metric_sources(service)]
        page, content_type = exposition(sources, METRICS, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    def _state(self, word: str | None) -> Response:
        if word is None:
            return error_response(Unavailable("no worker can serve"))
        return json_response(json.dumps({"status": word}).encode())

    async def read(self, request: Request, validated: Callable[[dict[str, Any]], B]) -> B:
        """The body. Raises `InvalidRequest`."""
        data = await read_body(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        return await self._front.threads.run(len(data) // 16, lambda: validated(parse_object(data)))

    def terms(self, request: Request) -> Terms:
        """What the headers say. Raises `InvalidRequest`."""
        headers = request.headers
        key = self._front.keys.find(headers.get("authorization", ""))
        return self._front.terms(headers.getlist(DEADLINE), headers.getlist(TENANT), key, request.scope.get(RECORD))

    def account(self, request: Request) -> str:
        """Whose request it is: its key's, where the service has keys."""
        key = self._front.keys.find(request.headers.get("authorization", ""))
        return "" if key is None else key.tenant

    def _delivery(self, agreed: Terms, body: GenerationBody) -> Delivery:
        return Delivery(stream=body.stream, keepalive_s=self._settings.keepalive_s, terms=agreed)


def _cards(maker: AnswerMaker) -> list[wire.ModelCard]:
    """A model under each of its names, then its adapters."""
    model, names = maker.served(), maker.names()
    parents: dict[str, str | None] = dict.fromkeys(names)
    parents |= dict.fromkeys(sorted(maker.service.fleet.adapters), names[0])
    return [
        wire.ModelCard(
            id=name,
            object="model",
            created=model.created,
            owned_by="raycomb",
            max_model_len=model.context,
            parent=parent,
        )
        for name, parent in parents.items()
    ]


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
    headers, path = dict(error.headers or {}), request.url.path
    if error.status_code == 405:
        headers["Allow"] = ", ".join(allowed_methods(request))
    told = {
        404: ("not_found", f"there is no {path} here"),
        405: ("method_not_allowed", f"{path} takes {' or '.join(allowed_methods(request))}, not {request.method}"),
    }
    code, words = told.get(error.status_code, ("http_error", f"{request.method} {path}: {error.detail}"))
    value = error_envelope(words, "invalid_request_error", code=code)
    return json_response(json.dumps(value).encode(), error.status_code, headers)

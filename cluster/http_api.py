"""The OpenAI-compatible HTTP endpoints, as an ASGI application over a fleet. Knows nothing of Ray.

A request is read, validated, turned into tokens and checked here, before anything is sent to a worker; then an
`AnswerResponse` runs it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from cluster.answer import Answer
from cluster.answer_response import AnswerResponse, Delivery, error_response, json_response
from cluster.api_settings import ApiSettings
from cluster.bodies import parse_object, read_body, validate
from cluster.errors import error_envelope
from cluster.fleet import Fleet, ServedModel
from cluster.http_guard import REQUEST_ID, Guard
from cluster.prompts import PromptEncoder
from cluster.requests import plan_chat, plan_completion, served_name
from cluster.side_threads import SideThreads
from cluster.text import TextModel
from cluster.voices import ChatVoice, CompletionVoice
from planner.errors import InvalidRequest, RaycombError, Unavailable
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

DEADLINE: Final = "x-request-timeout-ms"


@dataclass(frozen=True, slots=True)
class Service:
    """What the endpoints serve from."""

    fleet: Fleet
    text: TextModel
    settings: ApiSettings


def create_app(service: Service) -> FastAPI:
    """The application. Make it inside the running process: it keeps state that belongs to one event loop."""
    settings = service.settings
    app = FastAPI(
        title="Raycomb",
        version=settings.version,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    keys = [key.get_secret_value() for key in settings.api_keys]
    app.add_middleware(Guard, keys=keys, open_paths=settings.open_paths)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=settings.cors_origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID, "retry-after"],
    )
    app.add_exception_handler(RaycombError, _explain_error)
    app.add_exception_handler(HTTPException, _explain_http)
    endpoints = _Endpoints(service)
    for path, method, endpoint in (
        ("/v1/completions", "POST", endpoints.completions),
        ("/v1/chat/completions", "POST", endpoints.chat_completions),
        ("/v1/models", "GET", endpoints.models),
        ("/v1/models/{name:path}", "GET", endpoints.one_model),
        ("/tokenize", "POST", endpoints.tokenize),
        ("/detokenize", "POST", endpoints.detokenize),
        ("/health", "GET", endpoints.health),
        ("/ready", "GET", endpoints.ready),
        ("/version", "GET", endpoints.version),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, service: Service) -> None:
        self._fleet = service.fleet
        self._text = service.text
        self._settings = service.settings
        self._threads = SideThreads(
            inline_size=service.settings.inline_size,
            num_threads=service.settings.text_threads,
            max_waiting=service.settings.max_long_texts,
        )
        self._prompts = PromptEncoder(service.text, self._threads)

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, lambda value: validate(CompletionBody, value))
        model, name = self._model(body.model)
        prompts = await self._prompts.completion(body, model.context)
        plans = plan_completion(body, prompts, model, self._text.eos_ids, self._settings)
        scored = body.logprobs is not None
        answer = Answer(self._fleet, self._text, plans, body.stop_strings, scored=scored)
        voice = CompletionVoice(name, self._text.tokens, scored=scored)
        return AnswerResponse(answer, voice, self._delivery(request, body))

    async def chat_completions(self, request: Request) -> Response:
        body = await self._body(request, lambda value: validate(ChatBody, value))
        model, name = self._model(body.model)
        prompt = await self._prompts.chat(body, model.context)
        plans = plan_chat(body, prompt, model, self._text.eos_ids, self._settings)
        answer = Answer(self._fleet, self._text, plans, body.stop_strings, scored=body.logprobs)
        voice = ChatVoice(name, self._text.tokens, scored=body.logprobs)
        return AnswerResponse(answer, voice, self._delivery(request, body))

    async def models(self) -> Response:
        return _json(wire.ModelList(object="list", data=self._cards()))

    async def one_model(self, name: str) -> Response:
        model = self._served()
        served_name(name, model, self._settings)
        return _json(next(card for card in self._cards() if card.id == name))

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, _tokenize_body)
        model, _ = self._model(body.model)
        special = body.add_special_tokens
        if isinstance(body, TokenizeChatBody):
            ids = await self._prompts.conversation(body, context=None, add_special_tokens=special)
        else:
            ids = await self._prompts.ids(body.prompt, add_special_tokens=special)
        names = [self._text.tokens.name(token) for token in ids] if body.return_token_strs else None
        return _json(wire.Tokenized(count=len(ids), max_model_len=model.context, tokens=ids, token_strs=names))

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, lambda value: validate(DetokenizeBody, value))
        model, _ = self._model(body.model)
        highest = max(body.tokens, default=0)
        if highest >= model.vocab_size:
            raise InvalidRequest(f"token id {highest} is not below {model.vocab_size}", param="tokens")
        return _json(wire.Detokenized(prompt=await self._prompts.decoded(body.tokens)))

    async def health(self) -> Response:
        """Alive, and has been able to serve: a process that still waits for its first worker is starting."""
        return self._state("ok" if self._fleet.model is not None else None)

    async def ready(self) -> Response:
        return self._state("ready" if self._fleet.ready else None)

    async def version(self) -> Response:
        return json_response(json.dumps({"version": self._settings.version}).encode())

    def _state(self, word: str | None) -> Response:
        if word is None:
            return error_response(Unavailable("no worker can serve"))
        return json_response(json.dumps({"status": word}).encode())

    async def _body(self, request: Request, validated: Callable[[dict[str, Any]], B]) -> B:
        data = await read_body(request, self._settings.max_body_bytes)
        return await self._threads.run(len(data) // 16, lambda: validated(parse_object(data)))

    def _served(self) -> ServedModel:
        model = self._fleet.model
        if model is None:
            raise Unavailable("no worker has started yet")
        return model

    def _model(self, asked: str | None) -> tuple[ServedModel, str]:
        model = self._served()
        return model, served_name(asked, model, self._settings)

    def _cards(self) -> list[wire.ModelCard]:
        model = self._served()
        return [
            wire.ModelCard(
                id=name, object="model", created=model.created, owned_by="raycomb", max_model_len=model.context
            )
            for name in self._settings.served_model_names or (model.name,)
        ]

    def _delivery(self, request: Request, body: GenerationBody) -> Delivery:
        return Delivery(
            stream=body.stream,
            include_usage=body.include_usage,
            keepalive_s=self._settings.keepalive_s,
            deadline_s=_deadline_s(request.headers.get(DEADLINE)),
        )


def _tokenize_body(value: dict[str, Any]) -> TokenizeTextBody | TokenizeChatBody:
    if value.get("messages") is None:
        return validate(TokenizeTextBody, value)
    return validate(TokenizeChatBody, value)


def _deadline_s(value: str | None) -> float | None:
    """Seconds that the client gives the whole request; None: no deadline."""
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal()) or int(value[:20]) == 0:
        raise InvalidRequest(f"{DEADLINE} must be a whole number of milliseconds above 0", param=DEADLINE)
    milliseconds = int(value[:20])
    return milliseconds / 1000 if milliseconds < 2**31 else None


def _json(answer: wire.Answer) -> Response:
    return json_response(answer.model_dump_json().encode())


async def _explain_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RaycombError)
    return error_response(error)


async def _explain_http(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the same envelope; an Allow header is kept."""
    assert isinstance(error, HTTPException)
    told = {404: ("not_found", "there is no"), 405: ("method_not_allowed", "the method does not fit")}
    code, words = told.get(error.status_code, ("http_error", error.detail))
    value = error_envelope(f"{words}: {request.method} {request.url.path}", "invalid_request_error", code=code)
    headers = dict(error.headers or {})
    return json_response(json.dumps(value).encode(), error.status_code, headers)

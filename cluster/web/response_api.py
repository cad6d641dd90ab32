"""POST /v1/responses: a conversation in OpenAI's newer words. Nothing of it is kept."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.headers import Terms
from cluster.models import Models
from cluster.web.answer_response import AnswerResponse, Delivery
from cluster.web.bodies import validate
from cluster.web.response_telling import ResponseTelling
from cluster.web.responses import chat_of, own_names
from cluster.web.session_api import refuse_session
from protos.openai_responses import ResponsesBody


class ReadBody(Protocol):
    """Reads a request's body and validates it; raises `InvalidRequest`."""

    def __call__(
        self, request: Request, validated: Callable[[dict[str, Any]], ResponsesBody]
    ) -> Awaitable[ResponsesBody]: ...


def add_response_route(app: FastAPI, models: Models, read: ReadBody, terms_of: Callable[[Request], Terms]) -> None:
    """`read` and `terms_of` are the application's own ways to read a body and headers."""
    front = models.first.service
    keepalive_s = front.settings.keepalive_s

    async def responses(request: Request) -> Response:
        with front.meter.admission():
            refuse_session(request)
            terms = terms_of(request)
            body = await read(request, lambda value: validate(ResponsesBody, value))
            maker = models.of(body.model)
        with maker.service.meter.admission(), own_names():
            size = maker.threads.size_of(body.input, body.tools)
            answer, name, new_reader = await maker.chat(await maker.threads.run(size, lambda: chat_of(body)), terms)
        telling = ResponseTelling(body, name, new_reader)
        return AnswerResponse(answer, telling, Delivery(stream=body.stream, keepalive_s=keepalive_s, terms=terms))

    app.add_api_route("/v1/responses", responses, methods=["POST"], response_model=None)

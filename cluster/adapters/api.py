"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: for an operator's key alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from cluster.adapters.desk import AdapterDesk
from cluster.answers.maker import AnswerMaker
from cluster.models import Models
from cluster.web.bodies import parse_object, read_body, validate
from cluster.web.routes import add_routes
from planner.errors import InvalidRequest
from protos.openai_adapters import LoadAdapterBody, UnloadAdapterBody

B = TypeVar("B")


def add_adapter_routes(app: FastAPI, models: Models) -> None:
    endpoints = _Endpoints(models)
    add_routes(
        app,
        (
            ("/v1/load_lora_adapter", "POST", endpoints.load),
            ("/v1/unload_lora_adapter", "POST", endpoints.unload),
        ),
    )


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def load(self, request: Request) -> Response:
        body = await self._body(request, lambda value: validate(LoadAdapterBody, value))
        maker = self._models.of(body.base_model_name)
        if any(body.lora_name in other.known_names for other in self._models.all if other is not maker):
            raise InvalidRequest(f"{body.lora_name!r} is served beside another model", param="lora_name")
        await _desk(maker, body.base_model_name).load(body.lora_name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        body = await self._body(request, lambda value: validate(UnloadAdapterBody, value))
        maker = self._models.of(body.base_model_name or body.lora_name)
        await _desk(maker, body.base_model_name).unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _body(self, request: Request, validated: Callable[[dict[str, Any]], B]) -> B:
        """Raises `Unauthenticated` before it reads anything."""
        front = self._models.first
        front.keys.check_admin(request.headers.get("authorization", ""))
        settings = front.service.settings
        data = await read_body(request, settings.max_body_bytes, settings.body_timeout_s)
        return await front.threads.run(len(data) // 16, lambda: validated(parse_object(data)))


def _desk(maker: AnswerMaker, asked: str | None) -> AdapterDesk:
    maker.base(asked)
    desk = maker.service.adapters
    if desk is None:
        raise InvalidRequest("this service loads no adapters at run time: it was started without lora_folder")
    return desk

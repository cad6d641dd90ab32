"""`/debug/kv`, `/debug/plan`, `/debug/fleet`: what workers hold, why their last steps were as they were, and what this
gateway knows of all, as JSON.

For people and for the page. The first two make every worker look through its pool: not to be polled fast. A worker that
does not answer is named as `silent`, beside what the others say.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from cluster.answers.maker import Service
from cluster.telemetry.fleet_view import fleet_view
from cluster.web.answer_response import json_response
from cluster.web.debug_views import RollCall
from planner.errors import InvalidRequest
from worker.inspection import NUM_STEPS_KEPT

DEFAULT_STEPS: Final = 16


class DebugApi:
    """Owner: the application."""

    def __init__(self, services: Sequence[Service]) -> None:
        """One for each model."""
        self._services = services

    async def fleet(self, _request: Request) -> Response:
        """What this gateway knows without asking anybody: it may be polled."""
        return json_response(json.dumps(fleet_view(self._services)).encode())

    async def _inspect(self, num_steps: int) -> RollCall:
        """Of the workers of all models."""
        calls = await asyncio.gather(*(service.inspect(num_steps) for service in self._services))
        views = [view for call in calls for view in call.views]
        return RollCall(views, [worker for call in calls for worker in call.silent])

    async def kv(self, _request: Request) -> Response:
        return _json(await self._inspect(0), ("worker", "kv", "num_sequences", "sequences"))

    async def plan(self, request: Request) -> Response:
        """`?steps=N` of the last steps of every worker."""
        asked = request.query_params.get("steps", str(DEFAULT_STEPS))
        if not (asked.isascii() and asked.isdecimal() and int(asked[:6]) <= NUM_STEPS_KEPT):
            raise InvalidRequest(
                f"steps must be a whole number up to {NUM_STEPS_KEPT}, not {asked[:20]}", param="steps"
            )
        return _json(await self._inspect(int(asked)), ("worker", "limits", "steps"))


def _json(answer: RollCall, kept: tuple[str, ...]) -> Response:
    workers = [{name: view[name] for name in kept} for view in answer.views]
    return json_response(json.dumps({"workers": workers, "silent": answer.silent}).encode())

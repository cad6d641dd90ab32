"""The HTTP endpoints of batches: `/v1/batches`. Not for running them: `cluster.batches.runner` does."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Final

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.answers.maker import AnswerMaker
from cluster.batches.desk import BatchDesk
from cluster.batches.runner import BatchRunner
from cluster.batches.store import BatchStore, Page
from cluster.web.answer_response import json_response
from cluster.web.bodies import parse_object, read_body, validate
from cluster.web.routes import add_routes
from planner.errors import InvalidRequest
from protos.openai_answers import Answer
from protos.openai_batches import ENDED, Batch, BatchBody, BatchList, RequestCounts

WINDOW_S: Final = 24 * 3600
MOST_ON_A_PAGE: Final = 100

Account = Callable[[Request], str]


@dataclass(frozen=True, slots=True)
class Batches:
    """What files and batches are kept in, and what runs them. Owner: the gateway."""

    desk: BatchDesk
    runner: BatchRunner


def add_batch_routes(app: FastAPI, maker: AnswerMaker, batches: Batches | None, account: Account) -> None:
    """`batches` None: nothing is kept, and every endpoint says so."""
    endpoints = _Endpoints(maker, batches, account)
    add_routes(
        app,
        (
            ("/v1/batches", "POST", endpoints.create),
            ("/v1/batches", "GET", endpoints.list),
            ("/v1/batches/{batch_id}", "GET", endpoints.one),
            ("/v1/batches/{batch_id}/cancel", "POST", endpoints.cancel),
        ),
    )


def kept(batches: Batches | None) -> Batches:
    """Raises `InvalidRequest` where nothing is kept."""
    if batches is None:
        raise InvalidRequest("this service keeps no files and batches: its operator named no batch_store")
    return batches


def page_of(request: Request, others: Set[str] = frozenset()) -> Page:
    """What part of a list is asked for; `others` may be asked beside it. Raises `InvalidRequest`."""
    query = request.query_params
    if unknown := sorted(query.keys() - {"limit", "after"} - others):
        raise InvalidRequest(f"{unknown[0][:40]} is not a parameter of this list", param=unknown[0][:40])
    limit = query.get("limit", "20")
    is_number = limit.isascii() and limit.isdecimal() and len(limit) < 10
    if not is_number or not 1 <= int(limit) <= MOST_ON_A_PAGE:
        raise InvalidRequest(f"limit must lie in [1, {MOST_ON_A_PAGE}], not {limit[:20]!r}", param="limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, not {order[:20]!r}", param="order")
    return Page(query.get("after"), int(limit), oldest_first=order == "asc")


def answered(value: Answer) -> Response:
    return json_response(value.model_dump_json().encode())


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, maker: AnswerMaker, batches: Batches | None, account: Account) -> None:
        self._maker = maker
        self._settings = maker.service.settings
        self._batches = batches
        self._account = account

    async def create(self, request: Request) -> Response:
        batches, account = kept(self._batches), self._account(request)
        data = await read_body(request, self._settings.max_body_bytes, self._settings.body_timeout_s)
        body = await self._maker.threads.run(len(data) // 16, lambda: validate(BatchBody, parse_object(data)))
        now = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            status="validating",
            created_at=now,
            expires_at=now + WINDOW_S,
            request_counts=RequestCounts(total=0, completed=0, failed=0),
            metadata=body.metadata,
        )

        def add(store: BatchStore) -> None:
            if store.file(account, body.input_file_id, "input_file_id").purpose != "batch":
                raise InvalidRequest("input_file_id names a file that is no input of a batch", param="input_file_id")
            store.add_batch(account, batch, self._settings.max_open_batches_per_key)

        await batches.desk.ask(add)
        batches.runner.look()
        return answered(batch)

    async def list(self, request: Request) -> Response:
        page, account = page_of(request), self._account(request)
        data, has_more = await kept(self._batches).desk.ask(lambda store: store.batches(account, page))
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return answered(BatchList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def one(self, request: Request, batch_id: str) -> Response:
        account = self._account(request)
        return answered(await kept(self._batches).desk.ask(lambda store: store.batch(account, batch_id)))

    async def cancel(self, request: Request, batch_id: str) -> Response:
        account, now = self._account(request), int(time.time())

        def change(batch: Batch) -> Batch:
            if batch.status in ENDED:
                raise InvalidRequest(f"the batch has ended: it is {batch.status}", param="batch_id")
            if batch.status == "cancelling":
                return batch
            return batch.model_copy(update={"status": "cancelling", "cancelling_at": now})

        def cancel(store: BatchStore) -> Batch:
            return store.change(store.batch(account, batch_id).id, change)

        return answered(await kept(self._batches).desk.ask(cancel))

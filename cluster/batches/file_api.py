"""The HTTP endpoints of files: `/v1/files`, where batches have their input and their output."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import IO, Final

from fastapi import FastAPI, Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response

from cluster.answers.maker import AnswerMaker
from cluster.batches.api import Account, Batches, answered, kept, page_of
from cluster.batches.store import BatchStore
from cluster.web.routes import add_routes
from planner.errors import BodyTooLarge, BodyTooSlow, InvalidRequest
from protos.openai_batches import FileCard, FileDeleted, FileList

_ROUND_A_FILE: Final = 64 * 1024  # bytes of a form that are not the file's
_MOST_NAME: Final = 255


def add_file_routes(app: FastAPI, maker: AnswerMaker, batches: Batches | None, account: Account) -> None:
    """`batches` None: nothing is kept, and every endpoint says so."""
    endpoints = _Endpoints(maker, batches, account)
    add_routes(
        app,
        (
            ("/v1/files", "POST", endpoints.upload),
            ("/v1/files", "GET", endpoints.list),
            ("/v1/files/{file_id}", "GET", endpoints.one),
            ("/v1/files/{file_id}", "DELETE", endpoints.delete),
            ("/v1/files/{file_id}/content", "GET", endpoints.content),
        ),
    )


class _Endpoints:
    """One method an endpoint. Owner: the application."""

    def __init__(self, maker: AnswerMaker, batches: Batches | None, account: Account) -> None:
        self._settings = maker.service.settings
        self._batches = batches
        self._account = account

    async def upload(self, request: Request) -> Response:
        desk, account = kept(self._batches).desk, self._account(request)
        given = await self._form(request)
        try:
            path = await desk.ask(BatchStore.new_path)
            await asyncio.to_thread(_copy, given.file, path)
        finally:
            await given.close()
        name, most = (given.filename or "file")[:_MOST_NAME], self._settings.max_files_per_key
        return answered(await desk.ask(lambda store: _added(store, account, path, name, most)))

    async def list(self, request: Request) -> Response:
        account = self._account(request)
        page, purpose = page_of(request, {"purpose", "order"}), request.query_params.get("purpose")
        data, has_more = await kept(self._batches).desk.ask(lambda store: store.files(account, purpose, page))
        return answered(FileList(data=data, has_more=has_more))

    async def one(self, request: Request, file_id: str) -> Response:
        account = self._account(request)
        return answered(await kept(self._batches).desk.ask(lambda store: store.file(account, file_id)))

    async def content(self, request: Request, file_id: str) -> Response:
        account = self._account(request)
        path = await kept(self._batches).desk.ask(lambda store: store.path(account, file_id))
        return FileResponse(path, media_type="application/octet-stream")

    async def delete(self, request: Request, file_id: str) -> Response:
        account = self._account(request)
        await kept(self._batches).desk.ask(lambda store: store.delete_file(account, file_id))
        return answered(FileDeleted(id=file_id))

    async def _form(self, request: Request) -> UploadFile:
        """The file of the form, which lies on disk if it is large. Raises `InvalidRequest`, `BodyTooSlow`."""
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise InvalidRequest("a file comes as multipart/form-data, with purpose and file", param="file")
        limit = self._settings.max_file_bytes + _ROUND_A_FILE
        parser = MultiPartParser(request.headers, _bounded(request, limit), max_files=1, max_fields=8)
        try:
            async with asyncio.timeout(self._settings.file_timeout_s):
                form = await parser.parse()
        except MultiPartException as error:
            raise InvalidRequest(f"the form cannot be read: {error.message}", param="file") from error
        except TimeoutError as error:
            raise BodyTooSlow(f"the file did not come within {self._settings.file_timeout_s:g} s") from error
        except ClientDisconnect as error:
            raise InvalidRequest("the body broke off") from error
        given, purpose = form.get("file"), form.get("purpose")
        unknown = sorted(form.keys() - {"file", "purpose"})
        if isinstance(given, UploadFile) and purpose == "batch" and not unknown:
            return given
        await form.close()
        if unknown:
            raise InvalidRequest(f"{unknown[0]} is not a field of this request", param=unknown[0])
        if not isinstance(given, UploadFile):
            raise InvalidRequest("file is missing", param="file")
        raise InvalidRequest("purpose must be batch", param="purpose")


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes, None]:
    """The body's bytes. Raises `BodyTooLarge` as soon as it is over `limit`."""
    received = 0
    async for piece in request.stream():
        received += len(piece)
        if received > limit:
            raise BodyTooLarge(f"a file may have at most {limit - _ROUND_A_FILE} bytes", param="file")
        yield piece


def _copy(given: IO[bytes], path: Path) -> None:
    with path.open("xb") as file:
        shutil.copyfileobj(given, file)


def _added(store: BatchStore, account: str, path: Path, name: str, most: int) -> FileCard:
    try:
        return store.add_file(account, path, name, "batch", most)
    except BaseException:
        path.unlink(missing_ok=True)
        raise

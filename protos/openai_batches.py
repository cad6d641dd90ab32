"""Files and batches in OpenAI's words: what /v1/files and /v1/batches accept and answer, and the lines of a batch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from protos.openai_answers import Answer
from protos.openai_body import Body

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileCard(Answer):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class FileList(Answer):
    object: Literal["list"] = "list"
    data: list[FileCard]
    has_more: bool


class FileDeleted(Answer):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchBody(Body):
    """POST /v1/batches. `metadata` is for the client's own books."""

    input_file_id: str
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: dict[str, JsonValue] | None = None


class BatchLine(Body):
    """One line of an input file. `custom_id` names it in the output; `body` is what its endpoint takes."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"] = "POST"
    url: str
    body: dict[str, Any]


class RequestCounts(Answer):
    """Lines: those that have an answer, and those that have an error."""

    total: int
    completed: int
    failed: int


class BatchError(Answer):
    """What is wrong with an input file; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Answer):
    object: Literal["list"] = "list"
    data: list[BatchError]


class Batch(Answer):
    """A batch as it stands. Times are Unix seconds; each is there once what it tells of has happened."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, Any] | None = None


class BatchList(Answer):
    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool

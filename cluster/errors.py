"""The one table from Raycomb's errors to what clients see: HTTP status, OpenAI error type, gRPC status name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from planner import errors
from planner.errors import DeadlineUnmeetable, QueueFull, RaycombError


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one class of error is told. `grpc` is the name of a member of `grpc.StatusCode`.

    `retry_after_s` in whole seconds is the advice where the error brings none of its own; None: none is given.
    """

    status: int
    type: str
    grpc: str
    retry_after_s: int | None = None


MAX_MESSAGE: Final = 1000  # characters; below the 4 KB that gRPC details may have
MAX_PARAM: Final = 100

_INVALID: Final = "invalid_request_error"
_SERVER: Final = "server_error"

OUTCOMES: Final[dict[type[RaycombError], Outcome]] = {
    RaycombError: Outcome(500, _SERVER, "INTERNAL"),
    errors.RequestRefused: Outcome(400, _INVALID, "FAILED_PRECONDITION"),
    errors.InvalidRequest: Outcome(400, _INVALID, "INVALID_ARGUMENT"),
    errors.BodyTooLarge: Outcome(413, _INVALID, "INVALID_ARGUMENT"),
    errors.BodyTooSlow: Outcome(408, "timeout_error", "DEADLINE_EXCEEDED"),
    errors.UnknownModel: Outcome(404, _INVALID, "NOT_FOUND"),
    errors.UnknownSession: Outcome(404, _INVALID, "NOT_FOUND"),
    errors.UnknownFile: Outcome(404, _INVALID, "NOT_FOUND"),
    errors.UnknownBatch: Outcome(404, _INVALID, "NOT_FOUND"),
    errors.SessionBusy: Outcome(409, _INVALID, "FAILED_PRECONDITION"),
    errors.SessionFailed: Outcome(409, _INVALID, "FAILED_PRECONDITION"),
    errors.Unauthenticated: Outcome(401, "authentication_error", "UNAUTHENTICATED"),
    errors.QueueFull: Outcome(429, "rate_limit_error", "RESOURCE_EXHAUSTED", 1),
    errors.DeadlineUnmeetable: Outcome(408, "timeout_error", "DEADLINE_EXCEEDED", 1),
    errors.Unavailable: Outcome(503, _SERVER, "UNAVAILABLE", 1),
    errors.RequestFailed: Outcome(500, _SERVER, "INTERNAL"),
    errors.NoTokenLeft: Outcome(400, _INVALID, "INVALID_ARGUMENT"),
    errors.WorkerLost: Outcome(503, _SERVER, "UNAVAILABLE", 1),
    errors.DeadlineExceeded: Outcome(408, "timeout_error", "DEADLINE_EXCEEDED"),
    errors.SetupError: Outcome(500, _SERVER, "INTERNAL"),
}


def outcome(error: RaycombError) -> Outcome:
    """The row of the error's class, or of its nearest ancestor that has one."""
    return next(OUTCOMES[kind] for kind in type(error).__mro__ if kind in OUTCOMES)


def retry_after_s(error: RaycombError) -> int | None:
    """Whole seconds after which sending it again may help, at least 1; None where it will not."""
    if isinstance(error, DeadlineUnmeetable | QueueFull):
        return max(1, math.ceil(error.retry_after_s))
    return outcome(error).retry_after_s


def envelope(error: RaycombError) -> dict[str, Any]:
    """OpenAI's error object. A message that quotes something huge is cut."""
    return error_envelope(
        shortened(error.message), outcome(error).type, param=error.param and error.param[:MAX_PARAM], code=error.code
    )


def shortened(message: str) -> str:
    """The message, cut where it would be no use to a person and no good in a header or trailer."""
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."


def error_envelope(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, for what is not one of our errors (an unknown path, a wrong method)."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}

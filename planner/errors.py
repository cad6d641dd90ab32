"""Every error of Raycomb, explained once.

The tree lives in the lowest layer so that all layers share it; it knows nothing of HTTP or gRPC (`cluster.errors`
holds the one table to their statuses). `code` is the stable name of a class, used on the wire and by clients.

* `RequestRefused`: the request was not accepted. Nothing changed and nothing will come after it.
* `RequestFailed`: an accepted sequence could not be brought to its end. It is that sequence's terminal update.
* `SetupError`: the process cannot start as it was configured.
"""

from __future__ import annotations

from typing import ClassVar


class RaycombError(Exception):
    """Base of all. `message` is one sentence for a person; `param` names the request field at fault, if any."""

    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class RequestRefused(RaycombError):
    """Not accepted; nothing changed."""

    code = "refused"


class InvalidRequest(RequestRefused):
    """The client's request is malformed, out of range or unsupported. Sending it again will not help."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus answer is longer than the program's context."""

    code = "context_length_exceeded"


class NeverFits(InvalidRequest):
    """Prompt plus answer needs more cells than a worker's whole pool has."""

    code = "never_fits"


class BodyTooLarge(InvalidRequest):
    """The request's body is over the limit."""

    code = "body_too_large"


class BodyTooSlow(InvalidRequest):
    """The request's body did not come in the time that there is for it."""

    code = "body_too_slow"


class InvalidCellImage(InvalidRequest):
    """Cells from another worker do not fit this one's pool: another layout, or other numbers of cells or bytes."""

    code = "invalid_cell_image"


class UnknownModel(RequestRefused):
    """No such model is served here."""

    code = "model_not_found"


class UnknownSession(RequestRefused):
    """No such session is open, or it is somebody else's."""

    code = "session_not_found"


class UnknownFile(RequestRefused):
    """No such file is kept, or it is somebody else's."""

    code = "file_not_found"


class UnknownBatch(RequestRefused):
    """No such batch is known, or it is somebody else's."""

    code = "batch_not_found"


class SessionBusy(RequestRefused):
    """The session has a generation, and takes one at a time."""

    code = "session_busy"


class SessionFailed(RequestRefused):
    """A generation on this session failed; it takes no more."""

    code = "session_failed"


class Unauthenticated(RequestRefused):
    """No valid key or secret came with the request."""

    code = "unauthenticated"


class QueueFull(RequestRefused):
    """A bounded queue is full. Sending it again after `retry_after_s` seconds may help."""

    code = "queue_full"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class RateLimited(QueueFull):
    """The key's own limit is reached, whatever the service could do. It helps to come again later."""

    code = "rate_limited"


class DeadlineUnmeetable(RequestRefused):
    """The queue moves too slowly for the request's deadline. After `retry_after_s` seconds the queue may be shorter."""

    code = "deadline_unmeetable"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class Unavailable(RequestRefused):
    """No worker can take it now: starting, draining or none left."""

    code = "unavailable"


class RequestFailed(RaycombError):
    """An accepted sequence was ended before its time; this is its one terminal update."""

    code = "failed"


class ForwardFailed(RequestFailed):
    """The forward that ran this sequence failed; its cells went back and its other batch mates run on."""

    code = "forward_failed"


class GrammarFailed(RequestFailed):
    """The grammar that this sequence must follow grew beyond what may be spent on one; its batch mates run on."""

    code = "grammar_failed"


class NoTokenLeft(RequestFailed):
    """What the request rules out left this sequence no token to go on with. Its batch mates run on; sending it again
    helps only where other draws would not have led there."""

    code = "no_token_left"


class WorkerLost(RequestFailed):
    """The worker that ran this sequence is gone."""

    code = "worker_lost"


class DeadlineExceeded(RequestFailed):
    """The request's deadline passed."""

    code = "deadline_exceeded"


class SetupError(RaycombError):
    """The process cannot start as configured."""

    code = "setup"


class InvalidConfiguration(SetupError):
    """A setting is out of range or two settings contradict each other; the message has the numbers."""

    code = "invalid_configuration"


class InvalidCheckpoint(SetupError):
    """A checkpoint is corrupt, incomplete, or holds tensors that nothing uses."""

    code = "invalid_checkpoint"


class InvalidAdapter(SetupError):
    """An adapter is corrupt, does not fit the model, or asks for what is not supported; or there is no slot for it."""

    code = "invalid_adapter"


class InvalidProgram(SetupError):
    """A program is corrupt, or was made for another device, torch, or geometry; the message says which."""

    code = "invalid_program"


class InvalidStepLog(SetupError):
    """A recorded step log is no such thing, or contradicts itself."""

    code = "invalid_step_log"


class UnsupportedModel(SetupError):
    """The architecture, or an option of it, is not one that Raycomb runs."""

    code = "unsupported_model"


def _classes(root: type[RaycombError]) -> list[type[RaycombError]]:
    return [root, *(c for child in root.__subclasses__() for c in _classes(child))]


def error_from_code(code: str, message: str, param: str | None = None) -> RaycombError:
    """Rebuild an error that crossed the wire. An unknown code (a newer peer's) becomes a plain `RequestFailed`."""
    by_code = {c.code: c for c in _classes(RaycombError)}
    return by_code.get(code, RequestFailed)(message, param=param)

"""Which requests a worker refuses at once, each with the numbers in the message."""

from __future__ import annotations

from collections.abc import Iterable

from planner.errors import ContextLengthExceeded, InvalidRequest, NeverFits, QueueFull
from planner.limits import Limits
from planner.request import Request


def check_request(request: Request, limits: Limits) -> None:
    """Raise `InvalidRequest`, or its kind that fits, when a worker of these limits could never run the request."""
    outside = request.prompt[(request.prompt < 0) | (request.prompt >= limits.vocab_size)]
    _check_ids("prompt", outside[:1].tolist(), limits.vocab_size)
    _check_ids("stop_token_ids", request.stop_token_ids, limits.vocab_size)
    _check_ids("logit_bias", (token for token, _ in request.sampling.logit_bias), limits.vocab_size)
    _check_ids("bad_words", (token for word in request.sampling.bad_words for token in word), limits.vocab_size)
    if request.pooling is not None and not limits.pools:
        raise InvalidRequest("this program gives no vectors of prompts", param="pooling")
    if request.n > limits.max_num_seqs:
        raise InvalidRequest(
            f"n = {request.n} sequences are asked for, and at most {limits.max_num_seqs} run at once", param="n"
        )
    num_prompt, max_tokens = len(request.prompt), request.max_tokens
    if num_prompt + max_tokens > limits.context:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: {num_prompt + max_tokens} together, "
            f"and the context is {limits.context}",
            param="prompt" if num_prompt >= limits.context else "max_tokens",
        )
    # The last token of an answer is never fed, so it needs no cell.
    num_cells = num_prompt + max(0, max_tokens - 1)
    if num_cells > limits.capacity:
        raise NeverFits(
            f"the prompt of {num_prompt} tokens and max_tokens = {max_tokens} need {num_cells} cells, "
            f"and the pool has {limits.capacity}",
            param="max_tokens",
        )


def check_room(request: Request, num_waiting: int, num_tokens: int, limits: Limits) -> None:
    """Raise `QueueFull` when so many requests wait, or tokens are queued, that no more may."""
    if num_waiting >= limits.max_waiting:
        raise QueueFull(f"{num_waiting} requests are waiting, and no more than that may")
    if num_tokens and num_tokens + len(request.prompt) > limits.max_waiting_tokens:
        raise QueueFull(
            f"{num_tokens} tokens wait to be prefilled: with {len(request.prompt)} more they would be over "
            f"{limits.max_waiting_tokens}"
        )


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{param} has token id {token}, and the vocabulary is [0, {vocab_size})", param=param)

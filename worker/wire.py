"""Planner values to and from the messages of the data plane, and what both of its ends agree on.

Used by worker and gateway alike, so it is free of torch and of grpc. Not for HTTP: `protos.openai` is.
"""

from __future__ import annotations

import hmac
import math
import time
from collections.abc import Iterable

import numpy as np

from planner.blocks import BlockChanges
from planner.errors import DeadlineUnmeetable, InvalidRequest, QueueFull, RaycombError, RequestRefused, error_from_code
from planner.limits import Snapshot
from planner.request import Adapter, FinishReason, Pooling, Request, SamplingParams, TokenLogprobs, Update
from protos import worker_pb2 as pb

SECRET_METADATA = "x-raycomb-secret"

MAX_MESSAGE_BYTES = 64 * 2**20
"""Room for a prompt of a million tokens, or for the log probabilities of a long prompt read late."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A proxy in the environment is for the world outside.
    ("grpc.enable_http_proxy", 0),
    # A peer that died is noticed at once. One that is frozen, or whose host vanished, says nothing: pings find it
    # within 15 s. The second timeout is that of pings which are already under way for the transport's own ends.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Options of the gateway's channels, to workers and to the owner of sessions."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    # Gateways ping who is quiet; that is wanted and no abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers of one node on one port must be an error, not a lottery.
    ("grpc.so_reuseport", 0),
)
"""Options of the servers at the other ends."""

TO_WIRE = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: pb.FINISH_REASON_CANCELLED,
    FinishReason.FAILED: pb.FINISH_REASON_FAILED,
}
FROM_WIRE = {wire: reason for reason, wire in TO_WIRE.items()}

POOLING_TO_WIRE = {
    None: pb.POOLING_NONE,
    Pooling.LAST: pb.POOLING_LAST,
    Pooling.MEAN: pb.POOLING_MEAN,
}
POOLING_FROM_WIRE = {wire: pooling for pooling, wire in POOLING_TO_WIRE.items()}


def knows_secret(metadata: Iterable[tuple[str, str | bytes]] | None, secret: bytes) -> bool:
    """Whether a call's `metadata` has the application's secret; takes as long whatever it has instead."""
    given = dict(metadata or ()).get(SECRET_METADATA, "")
    return hmac.compare_digest(given.encode() if isinstance(given, str) else given, secret)


def request_to_proto(request_id: int, request: Request) -> pb.Submit:
    """Raises `InvalidRequest` for a token id that does not fit in 32 bits; the planner checks the vocabulary."""
    outside = request.prompt[(request.prompt < 0) | (request.prompt >= 2**31)]  # a prompt may be very long
    _check_ids("prompt", outside[:1].tolist())
    _check_ids("stop_token_ids", request.stop_token_ids)
    return pb.Submit(
        request_id=request_id,
        prompt=request.prompt.tolist(),
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=sorted(request.stop_token_ids),
        n=request.n,
        priority=request.priority,
        prompt_logprobs=request.prompt_logprobs,
        sampling=_sampling_to_proto(request.sampling),
        num_generated=request.num_generated,
        tenant=request.tenant,
        timeout_ms=None if request.deadline is None else _milliseconds(request.deadline - time.monotonic()),
        traceparent=request.trace,
        pooling=POOLING_TO_WIRE[request.pooling],
        adapter=None if request.adapter is None else adapter_to_proto(request.adapter),
    )


def request_from_proto(submit: pb.Submit) -> Request:
    """The request of a `Submit` that came now. Raises `InvalidRequest` for what no planner would take."""
    if not submit.HasField("sampling"):
        raise InvalidRequest("the request has no sampling parameters", param="sampling")
    if submit.pooling not in POOLING_FROM_WIRE:
        raise InvalidRequest(f"pooling {submit.pooling} is not known here", param="pooling")
    return Request(
        prompt=np.array(submit.prompt, dtype=np.int64),
        max_tokens=submit.max_tokens,
        sampling=_sampling_from_proto(submit.sampling),
        min_tokens=submit.min_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        n=submit.n,
        priority=submit.priority,
        prompt_logprobs=submit.prompt_logprobs,
        num_generated=submit.num_generated,
        tenant=submit.tenant,
        deadline=time.monotonic() + submit.timeout_ms / 1000 if submit.HasField("timeout_ms") else None,
        trace=submit.traceparent,
        pooling=POOLING_FROM_WIRE[submit.pooling],
        adapter=adapter_from_proto(submit.adapter) if submit.HasField("adapter") else None,
    )


def write_update(message: pb.SequenceUpdate, request_id: int, update: Update | RequestRefused) -> None:
    """Put news of one sequence into an empty `message`, where it is to be sent from: one that is appended is copied.

    A refusal speaks for its whole request, at index 0. `request_id` is the gateway's.
    """
    message.request_id = request_id
    if isinstance(update, RequestRefused):
        message.finish_reason = pb.FINISH_REASON_REFUSED
        message.error.CopyFrom(error_to_proto(update))
        return
    message.index = update.index
    message.tokens.extend(update.tokens)
    message.num_cached_tokens = update.num_cached_tokens
    if update.logprobs:
        message.logprobs.extend(map(_logprobs_to_proto, update.logprobs))
    if update.prompt_logprobs:
        message.prompt_logprobs.extend(map(_logprobs_to_proto, update.prompt_logprobs))
    if update.vector:
        message.vector.extend(update.vector)
    if update.finish_reason is not None:
        message.finish_reason = TO_WIRE[update.finish_reason]
    if update.error is not None:
        message.error.CopyFrom(error_to_proto(update.error))


def update_from_proto(
    message: pb.SequenceUpdate, prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
) -> Update | RequestRefused:
    """The update, with the gateway's `request_id`, or the refusal of the whole request. `prompt_logprobs`: the
    message's, where they have been read before.

    A finish reason of a newer peer that is unknown here ends the sequence as FAILED: it must not go on for ever.
    """
    reason = message.finish_reason
    if reason == pb.FINISH_REASON_REFUSED:
        error = error_from_proto(message.error)
        return error if isinstance(error, RequestRefused) else RequestRefused(error.message, param=error.param)
    # Most have one token and nothing else; to go through a repeated field takes long, even one that is empty.
    logprobs, vector = message.logprobs, message.vector
    if prompt_logprobs is None:
        prompt_logprobs = tuple(map(logprobs_from_proto, message.prompt_logprobs)) if message.prompt_logprobs else ()
    return Update(
        message.request_id,
        message.index,
        tuple(message.tokens[:]),
        tuple(map(logprobs_from_proto, logprobs)) if logprobs else (),
        prompt_logprobs,
        message.num_cached_tokens,
        None if reason == pb.FINISH_REASON_UNSPECIFIED else FROM_WIRE.get(reason, FinishReason.FAILED),
        error_from_proto(message.error) if message.HasField("error") else None,
        tuple(vector) if vector else (),
    )


def error_to_proto(error: RaycombError) -> pb.Error:
    message = pb.Error(code=error.code, message=error.message, param=error.param or "")
    if isinstance(error, QueueFull | DeadlineUnmeetable):
        message.retry_after_s = error.retry_after_s
    return message


def error_from_proto(message: pb.Error) -> RaycombError:
    """The typed error; one of a newer peer that is unknown here becomes a plain `RequestFailed`."""
    error = error_from_code(message.code, message.message, message.param or None)
    if isinstance(error, QueueFull | DeadlineUnmeetable):
        error.retry_after_s = message.retry_after_s
    return error


def snapshot_to_proto(snapshot: Snapshot, *, draining: bool = False, newest_request: int = 0) -> pb.Snapshot:
    """`draining` is the engine's word, not the planner's: no new request is taken. `newest_request`: the id of the last
    one that the receiver had asked for when it was made; 0: none."""
    return pb.Snapshot(
        capacity=snapshot.capacity,
        free_cells=snapshot.free_cells,
        owned_cells=snapshot.owned_cells,
        cached_cells=snapshot.cached_cells,
        num_running=snapshot.num_running,
        num_waiting=snapshot.num_waiting,
        queued_prefill_tokens=snapshot.queued_prefill_tokens,
        step=snapshot.step,
        draining=draining,
        queue_tokens_per_s=snapshot.queue_tokens_per_s,
        answer_tokens=snapshot.answer_tokens,
        ends_per_token=snapshot.ends_per_token,
        newest_request=newest_request,
    )


def snapshot_from_proto(message: pb.Snapshot) -> Snapshot:
    """The planner's part; read `message.draining` and `message.newest_request` beside it."""
    return Snapshot(
        capacity=message.capacity,
        free_cells=message.free_cells,
        owned_cells=message.owned_cells,
        cached_cells=message.cached_cells,
        num_running=message.num_running,
        num_waiting=message.num_waiting,
        queued_prefill_tokens=message.queued_prefill_tokens,
        step=message.step,
        queue_tokens_per_s=message.queue_tokens_per_s if message.HasField("queue_tokens_per_s") else None,
        answer_tokens=message.answer_tokens,
        ends_per_token=message.ends_per_token,
    )


def blocks_to_proto(changes: BlockChanges) -> pb.Blocks:
    return pb.Blocks(added=changes.added, removed=changes.removed)


def blocks_from_proto(message: pb.Blocks) -> BlockChanges:
    return BlockChanges(added=tuple(message.added), removed=tuple(message.removed))


def adapter_to_proto(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(name=adapter.name, revision=adapter.revision)


def adapter_from_proto(message: pb.Adapter) -> Adapter:
    return Adapter(message.name, message.revision)


def _sampling_to_proto(sampling: SamplingParams) -> pb.Sampling:
    _check_ids("logit_bias", (token for token, _ in sampling.logit_bias))
    _check_ids("bad_words", (token for word in sampling.bad_words for token in word))
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        logprobs=sampling.logprobs,
        grammar=sampling.grammar,
        bad_words=[pb.Word(tokens=word) for word in sampling.bad_words],
    )


def _sampling_from_proto(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        grammar=message.grammar if message.HasField("grammar") else None,
        bad_words=tuple(tuple(word.tokens) for word in message.bad_words),
    )


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        token=logprobs.token,
        logprob=logprobs.logprob,
        top_tokens=[token for token, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    """Of one token."""
    return TokenLogprobs(
        token=message.token,
        logprob=message.logprob if message.HasField("logprob") else None,
        top=tuple(zip(message.top_tokens, message.top_logprobs, strict=True)),
    )


def _check_ids(param: str, ids: Iterable[int]) -> None:
    for token in ids:
        if not 0 <= token < 2**31:
            raise InvalidRequest(f"token id {token} in {param} does not fit in 31 bits", param=param)

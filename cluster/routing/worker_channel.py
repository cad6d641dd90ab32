"""The connection below a gateway's stream to one worker: how it is made, and in words why it ended."""

from __future__ import annotations

import asyncio

import grpc

from worker import tls
from worker.wire import CHANNEL_OPTIONS

HELLO_TIMEOUT_S = 10.0
STREAM_OPTIONS = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # a fresh stream waits for no old backoff
TLS_STREAM_OPTIONS = (*STREAM_OPTIONS, *tls.CHANNEL_OPTIONS)


def channel_to(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Without `credentials` it speaks plaintext."""
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=STREAM_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=TLS_STREAM_OPTIONS)


def why_it_ended(errors: list[BaseException]) -> str:
    """In words, from what the stream's tasks raised; raises what is no failure of a connection."""
    for error in errors:
        if not isinstance(error, grpc.aio.AioRpcError | TimeoutError | asyncio.InvalidStateError):
            raise error
    for error in errors:
        if isinstance(error, grpc.aio.AioRpcError):
            return f"broke: {error.code().name} {error.details()}"
    return f"gave no answer for {HELLO_TIMEOUT_S:g} s" if errors else "ended"

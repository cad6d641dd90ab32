"""The owner of the sessions as a gateway asks it: over gRPC, where it is told that the owner listens. Free of Ray."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import Final

import grpc
import grpc.aio

from cluster.sessions.histories import Begun, SessionView
from cluster.sessions.wire import begun_from_proto, session_from_proto
from planner.errors import RequestRefused, Unavailable
from protos import sessions_pb2 as pb
from protos import sessions_pb2_grpc
from worker import tls
from worker.wire import CHANNEL_OPTIONS, SECRET_METADATA, error_from_proto

ANSWER_WITHIN_S: Final = 8.0
"""Below the lease, so that a renewal that fails leaves time for another."""

OPTIONS: Final = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))  # a new owner waits for no old backoff


class RemoteOwner:
    """A `cluster.sessions.owner.SessionOwner`. Owner: a gateway, on its event loop."""

    def __init__(
        self, secret: str, credentials: grpc.ChannelCredentials | None = None, patience_s: float = ANSWER_WITHIN_S
    ) -> None:
        self._metadata = ((SECRET_METADATA, secret),)
        self._credentials = credentials
        self._patience_s = patience_s
        self._address: str | None = None
        self._channel: grpc.aio.Channel | None = None
        self._known = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str | None:
        return self._address

    def set_address(self, address: str | None) -> None:
        """Where the owner listens from now on; None: there is none now, and questions wait for one."""
        if address == self._address:
            return
        self._leave()
        self._address = address
        if address is not None:
            self._channel = self._open(address)
            self._known.set()

    async def shut(self) -> None:
        """No question may be asked any more."""
        self._leave()
        await asyncio.gather(*self._closing)

    def _leave(self) -> None:
        """Questions that are under way end by themselves."""
        self._known.clear()
        if self._channel is not None:
            closing = asyncio.create_task(self._channel.close(self._patience_s), context=contextvars.Context())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._channel = None

    async def open(self, account: str) -> SessionView:
        return session_from_proto((await self._ask(pb.Question(account=account, open=pb.Open()))).session)

    async def get(self, session_id: str, account: str) -> SessionView:
        return session_from_proto((await self._ask(pb.Question(account=account, get=session_id))).session)

    async def of(self, account: str) -> list[SessionView]:
        told = await self._ask(pb.Question(account=account, list=pb.List()))
        return [session_from_proto(session) for session in told.sessions.sessions]

    async def fork(self, session_id: str, account: str, at: int | None) -> SessionView:
        fork = pb.Fork(session_id=session_id, at=at)
        return session_from_proto((await self._ask(pb.Question(account=account, fork=fork))).session)

    async def close(self, session_id: str, account: str) -> None:
        await self._ask(pb.Question(account=account, close=session_id))

    async def begin(
        self, session_id: str, account: str, delta: Sequence[int], max_tokens: int | None, context: int
    ) -> Begun:
        begin = pb.Begin(session_id=session_id, delta=delta, max_tokens=max_tokens, context=context)
        return begun_from_proto((await self._ask(pb.Question(account=account, begin=begin))).begun)

    async def renew(self, turn_ids: Sequence[str]) -> list[str]:
        return list((await self._ask(pb.Question(renew=pb.Renew(turn_ids=turn_ids)))).lost.turn_ids)

    async def end(self, turn_id: str, generated: Sequence[int], *, failed: bool) -> bool:
        end = pb.End(turn_id=turn_id, generated=generated, failed=failed)
        return (await self._ask(pb.Question(end=end))).kept

    async def _ask(self, question: pb.Question) -> pb.Answer:
        """Raises the owner's refusal, and `Unavailable` where it does not answer."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._known.wait()
                assert self._channel is not None, "known"
                stub = sessions_pb2_grpc.SessionKeeperStub(self._channel)
                answer: pb.Answer = await stub.Ask(question, metadata=self._metadata)
        except TimeoutError as error:
            raise Unavailable(f"the owner of the sessions did not answer in {self._patience_s:g} s") from error
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            code = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "closed"
            raise Unavailable(f"the owner of the sessions does not answer: {code}") from error
        if answer.HasField("refusal"):
            refusal = error_from_proto(answer.refusal)
            raise refusal if isinstance(refusal, RequestRefused) else RequestRefused(refusal.message)
        return answer

    def _open(self, address: str) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=OPTIONS)
        return grpc.aio.secure_channel(address, self._credentials, options=(*OPTIONS, *tls.CHANNEL_OPTIONS))

"""What all RPCs for clients do alike: whose call it is, until when, and how a failure is told. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from cluster.access.key_ring import KeyUse
from cluster.answers.maker import AnswerMaker
from cluster.headers import DEADLINE, TENANT, Terms
from cluster.rpc.status import Call, CallStatus, metadata_values
from cluster.telemetry.request_record import RequestRecord
from planner.errors import BodyTooLarge

M = TypeVar("M", bound=Message)
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, on what terms. `key`: None where the service has no keys."""

    terms: Terms
    key: KeyUse | None

    @property
    def account(self) -> str:
        """Whose sessions it may use."""
        return "" if self.key is None else self.key.tenant


class Calls:
    """Owner: a gateway; lives on its event loop."""

    def __init__(self, maker: AnswerMaker) -> None:
        self._maker = maker
        self._max_bytes = maker.service.settings.max_body_bytes

    async def unary(self, request: Message, call: Call, work: Callable[[Caller], Awaitable[M]], empty: M) -> M:
        """What `work` gives; after a failure, which the call's status tells, `empty`."""
        with CallStatus(call):
            caller = self._admit(request, call)
            async with asyncio.timeout(caller.terms.left_s):
                return await work(caller)
        return empty

    def admit_for_tokens(
        self, method: str, request: Message, call: Call, status: CallStatus, held: ExitStack
    ) -> Caller:
        """For what asks workers for something: it is recorded, and counts for its key, until `held` is closed.

        Raises `RequestRefused`."""
        metadata = list(call.invocation_metadata())

        def sent(name: str) -> str:
            return "".join(metadata_values(metadata, name)[:1])

        record = held.enter_context(self._maker.records.request(method, status.request_id, sent))
        caller = self._admit(request, call, record)
        if caller.key is not None:
            held.enter_context(caller.key.admitted())
        return caller

    async def body(self, request: M, made: Callable[[M], B]) -> B:
        """What `made` makes of the message, off the event loop where it is long."""
        return await self._maker.threads.run(request.ByteSize() // 16, lambda: made(request))

    def _admit(self, request: Message, call: Call, record: RequestRecord | None = None) -> Caller:
        metadata = list(call.invocation_metadata())
        authorization = "".join(metadata_values(metadata, "authorization")[:1])
        key = self._maker.keys.find(authorization)
        size = request.ByteSize()
        if size > self._max_bytes:
            raise BodyTooLarge(f"the request has {size} bytes; at most {self._max_bytes} are read")
        deadlines, tenants = metadata_values(metadata, DEADLINE), metadata_values(metadata, TENANT)
        return Caller(self._maker.terms(deadlines, tenants, key, record), key)

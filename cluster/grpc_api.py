"""The gRPC service for clients, over the same road as the HTTP endpoints. Knows nothing of Ray.

A failure ends a stream with an empty message, since Serve's proxy passes a status and trailers on only together with
one; `cluster.grpc_front` drops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack
from typing import Final, TypeVar

from google.protobuf.message import Message

from cluster.answer import Answer
from cluster.answer_maker import AnswerMaker
from cluster.choice import Piece
from cluster.grpc_bodies import detokenize_body, generation_body, tokenize_body
from cluster.grpc_status import Call, CallStatus, metadata_values
from cluster.grpc_voice import GrpcVoice
from cluster.headers import DEADLINE, TENANT, Terms
from cluster.key_ring import KeyUse
from cluster.request_record import RequestRecord
from planner.errors import BodyTooLarge
from protos import inference_pb2 as pb
from protos.openai import CompletionBody

M = TypeVar("M", bound=Message)
B = TypeVar("B")

GENERATE: Final = "raycomb.v1.Inference/Generate"


class GrpcApi:
    """One method an RPC. Owner: a gateway; lives on its event loop.

    Every method tells its failures through `call` and then returns, or ends with, an empty message.
    """

    def __init__(self, maker: AnswerMaker) -> None:
        self._maker = maker
        self._settings = maker.service.settings

    async def generate(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Ending the iteration, by `aclose` or by cancelling its task, ends what runs on the workers."""
        metadata = list(call.invocation_metadata())

        def sent(name: str) -> str:
            return "".join(metadata_values(metadata, name)[:1])

        with CallStatus(call) as status, ExitStack() as held:
            record = held.enter_context(self._maker.records.request(GENERATE, status.request_id, sent))
            with self._maker.service.meter.admission():
                agreed, key = self._admit(request, call, record)
                if key is not None:
                    held.enter_context(key.admitted())
                async with asyncio.timeout(agreed.left_s):
                    answer = await self._answer(request, agreed)
            try:
                with answer.meter:
                    voice = GrpcVoice(self._maker.service.text.tokens)
                    pieces = answer.start()
                    while not answer.finished:
                        pieces += await self._news(answer, agreed)
                        message = voice.message(pieces, answer.counts(), last=answer.finished)
                        pieces = []
                        if message is not None:
                            yield message
            finally:
                await answer.close()
        if status.failed:
            yield pb.GenerateResponse()

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        async def work() -> pb.TokenizeResponse:
            body = await self._body(request, tokenize_body)
            model, _ = self._maker.model(body.model)
            return pb.TokenizeResponse(token_ids=await self._maker.token_ids(body), context=model.context)

        return await self._unary(request, call, work, pb.TokenizeResponse())

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        async def work() -> pb.DetokenizeResponse:
            return pb.DetokenizeResponse(text=await self._maker.decoded(await self._body(request, detokenize_body)))

        return await self._unary(request, call, work, pb.DetokenizeResponse())

    async def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        async def work() -> pb.ListModelsResponse:
            model = self._maker.served()
            names = self._maker.names()
            cards = [pb.Model(name=name, created=model.created, context=model.context) for name in names]
            return pb.ListModelsResponse(models=cards)

        return await self._unary(request, call, work, pb.ListModelsResponse())

    async def _unary(self, request: Message, call: Call, work: Callable[[], Awaitable[M]], empty: M) -> M:
        with CallStatus(call):
            agreed, _ = self._admit(request, call)
            async with asyncio.timeout(agreed.left_s):
                return await work()
        return empty

    def _admit(self, request: Message, call: Call, record: RequestRecord | None = None) -> tuple[Terms, KeyUse | None]:
        """Whose call it is, when it must be over, and its key if there are any. Raises `RequestRefused`."""
        metadata = list(call.invocation_metadata())
        authorization = "".join(metadata_values(metadata, "authorization")[:1])
        key = self._maker.keys.find(authorization)
        size = request.ByteSize()
        if size > self._settings.max_body_bytes:
            raise BodyTooLarge(f"the request has {size} bytes; at most {self._settings.max_body_bytes} are read")
        deadlines, tenants = metadata_values(metadata, DEADLINE), metadata_values(metadata, TENANT)
        return self._maker.terms(deadlines, tenants, key, record), key

    async def _body(self, request: M, made: Callable[[M], B]) -> B:
        return await self._maker.threads.run(request.ByteSize() // 16, lambda: made(request))

    async def _answer(self, request: pb.GenerateRequest, agreed: Terms) -> Answer:
        body = await self._body(request, generation_body)
        if isinstance(body, CompletionBody):
            answer, _ = await self._maker.completion(body, agreed)
        else:
            answer, _, _ = await self._maker.chat(body, agreed)
        return answer

    async def _news(self, answer: Answer, agreed: Terms) -> list[Piece]:
        """The next pieces. Raises `TimeoutError` where none came in time.

        The time is watched here and not around the stream, which is suspended in whoever reads it.
        """
        while True:
            patience_s = self._settings.keepalive_s
            if (longest_s := agreed.patience_s) is not None:
                patience_s = min(patience_s, longest_s)
                if patience_s <= 0:
                    raise TimeoutError
            if pieces := await answer.next(patience_s):
                return pieces

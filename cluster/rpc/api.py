"""The gRPC service for clients, over the same road as the HTTP endpoints. Knows nothing of Ray.

A failure ends a stream with an empty message, since Serve's proxy passes a status and trailers on only together with
one; `cluster.rpc.front` drops it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from functools import partial
from typing import Final

from cluster.answers.answer import Answer
from cluster.answers.choice import Piece
from cluster.answers.maker import AnswerMaker
from cluster.headers import Terms
from cluster.models import Models
from cluster.rpc.bodies import detokenize_body, generation_body, tokenize_body
from cluster.rpc.calls import Caller, Calls
from cluster.rpc.embed import GrpcEmbed
from cluster.rpc.sessions import GrpcSessions
from cluster.rpc.status import Call, CallStatus
from cluster.rpc.voice import GrpcVoice
from protos import inference_pb2 as pb
from protos.openai import ChatBody, CompletionBody

GENERATE: Final = "raycomb.v1.Inference/Generate"


class GrpcApi:
    """One method an RPC. Owner: a gateway; lives on its event loop.

    Every method tells its failures through `call` and then returns, or ends with, an empty message.
    """

    def __init__(self, models: Models) -> None:
        self._models = models
        self._calls = Calls(models.first)
        self._meter = models.first.service.meter
        self._keepalive_s = models.first.service.settings.keepalive_s
        self.sessions = GrpcSessions(models, self._calls)
        self.embedding = GrpcEmbed(models, self._calls)

    async def generate(self, request: pb.GenerateRequest, call: Call) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Ending the iteration, by `aclose` or by cancelling its task, ends what runs on the workers."""
        with CallStatus(call) as status, ExitStack() as held:
            with self._meter.admission():
                caller = self._calls.admit_for_tokens(GENERATE, request, call, status, held)
                async with asyncio.timeout(caller.terms.left_s):
                    body = await self._calls.body(request, generation_body)
                    session_id = None if isinstance(body, ChatBody) else body.session_id
                    maker = await self._models.of_session(body.model, session_id, caller.account)
            with maker.service.meter.admission():
                async with asyncio.timeout(caller.terms.left_s):
                    answer, voice = await _answer(maker, body, caller)
            try:
                with answer.meter:
                    async with aclosing(self._messages(answer, voice, caller.terms)) as messages:
                        async for message in messages:
                            yield message
            finally:
                await answer.close()
        if status.failed:
            yield pb.GenerateResponse()

    async def _messages(
        self, answer: Answer, voice: GrpcVoice, agreed: Terms
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """All that the answer says: as it comes, or at its end where only then it is known what is told."""
        pieces = await answer.start()
        while not answer.finished:
            pieces += await self._news(answer, agreed)
            if not answer.finished and not answer.tells_best:
                write = partial(voice.message, pieces, answer.counts())
                if (message := await answer.written(pieces, write)) is not None:
                    yield message
                pieces = []

        def write_last() -> pb.GenerateResponse:
            told = answer.pieces_of_best(pieces) if answer.tells_best else pieces
            return voice.last_message(told, answer.counts(), answer.prompt_of(0).scores)

        yield await answer.written(pieces, write_last, whole=True)

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        async def work(_caller: Caller) -> pb.TokenizeResponse:
            body = await self._calls.body(request, tokenize_body)
            maker = self._models.of(body.model)
            model = maker.model(body.model).model
            return pb.TokenizeResponse(token_ids=await maker.token_ids(body), context=model.context)

        return await self._calls.unary(request, call, work, pb.TokenizeResponse())

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        async def work(_caller: Caller) -> pb.DetokenizeResponse:
            body = await self._calls.body(request, detokenize_body)
            return pb.DetokenizeResponse(text=await self._models.of(body.model).decoded(body))

        return await self._calls.unary(request, call, work, pb.DetokenizeResponse())

    async def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        async def work(_caller: Caller) -> pb.ListModelsResponse:
            cards = []
            for maker in self._models.known:
                model = maker.served()
                names = (*maker.names(), *sorted(maker.service.fleet.adapters))
                cards += [pb.Model(name=name, created=model.created, context=model.context) for name in names]
            return pb.ListModelsResponse(models=cards)

        return await self._calls.unary(request, call, work, pb.ListModelsResponse())

    async def _news(self, answer: Answer, agreed: Terms) -> list[Piece]:
        """The next pieces. Raises `TimeoutError` where none came in time.

        The time is watched here and not around the stream, which is suspended in whoever reads it.
        """
        while True:
            patience_s = self._keepalive_s
            if (longest_s := agreed.patience_s) is not None:
                patience_s = min(patience_s, longest_s)
                if patience_s <= 0:
                    raise TimeoutError
            if pieces := await answer.next(patience_s):
                return pieces


async def _answer(maker: AnswerMaker, body: CompletionBody | ChatBody, caller: Caller) -> tuple[Answer, GrpcVoice]:
    tokens, num_top = maker.service.text.tokens, body.prompt_logprobs
    if isinstance(body, ChatBody):
        answer, _, new_reader = await maker.chat(body, caller.terms)
        return answer, GrpcVoice(tokens, scored=body.logprobs, num_prompt_top=num_top, new_reader=new_reader)
    if body.session_id is None:
        answer, _ = await maker.completion(body, caller.terms)
    else:
        answer, _ = await maker.extension(body, body.session_id, caller.account, caller.terms)
    return answer, GrpcVoice(tokens, scored=body.logprobs is not None, num_prompt_top=num_top)

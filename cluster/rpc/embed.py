"""The RPC of vectors: what POST /v1/embeddings does, in messages."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Final

from cluster.answers.embeddings import Vectors, embed, plan_embeddings
from cluster.models import Models
from cluster.rpc.bodies import embedding_body
from cluster.rpc.calls import Calls
from cluster.rpc.status import Call, CallStatus
from protos import inference_pb2 as pb

EMBED: Final = "raycomb.v1.Inference/Embed"


class GrpcEmbed:
    """Owner: the gRPC service."""

    def __init__(self, models: Models, calls: Calls) -> None:
        self._models = models
        self._calls = calls

    async def embed(self, request: pb.EmbedRequest, call: Call) -> pb.EmbedResponse:
        """Tells a failure through `call`; cancelled, or where its time is over, nothing of it goes on."""
        with CallStatus(call) as status, ExitStack() as held:
            with self._models.first.service.meter.admission():
                terms = self._calls.admit_for_tokens(EMBED, request, call, status, held).terms
                async with asyncio.timeout(terms.left_s):
                    body = await self._calls.body(request, embedding_body)
                maker = self._models.of(body.model)
            service = maker.service
            with service.meter.admission():
                async with asyncio.timeout(terms.left_s):
                    plan = await plan_embeddings(maker, body, terms)
            meter = service.meter.request(terms)
            with meter:
                async with asyncio.timeout(terms.patience_s):
                    vectors = await embed(service.fleet, plan)
                    meter.prompt(vectors.num_tokens)
                    return await maker.threads.run_admitted(vectors.rows.size, lambda: _told(vectors))
        return pb.EmbedResponse()


def _told(vectors: Vectors) -> pb.EmbedResponse:
    rows = [pb.Vector(values=row) for row in vectors.rows.tolist()]
    return pb.EmbedResponse(vectors=rows, usage=pb.Usage(prompt_tokens=vectors.num_tokens))

"""POST /v1/embeddings: reads the body, has the vectors made, and writes them as numbers or in base64."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import Response

from cluster.answers.embeddings import EmbeddingPlan, Vectors, embed, plan_embeddings
from cluster.headers import Terms
from cluster.models import Models
from cluster.web.bodies import validate
from cluster.web.whole_response import WholeResponse
from protos.openai_embeddings import Embedding, EmbeddingBody, EmbeddingList, EmbeddingUsage


class ReadBody(Protocol):
    """Reads a request's body and validates it; raises `InvalidRequest`."""

    def __call__(
        self, request: Request, validated: Callable[[dict[str, Any]], EmbeddingBody]
    ) -> Awaitable[EmbeddingBody]: ...


def add_embedding_route(app: FastAPI, models: Models, read: ReadBody, terms_of: Callable[[Request], Terms]) -> None:
    """`read` and `terms_of` are the application's own ways to read a body and headers."""

    async def embeddings(request: Request) -> Response:
        with models.first.service.meter.admission():
            terms = terms_of(request)
            body = await read(request, lambda value: validate(EmbeddingBody, value))
            maker = models.of(body.model)
        with maker.service.meter.admission():
            plan = await plan_embeddings(maker, body, terms)
        meter = maker.service.meter.request(terms)

        async def work() -> bytes:
            vectors = await embed(maker.service.fleet, plan)
            meter.prompt(vectors.num_tokens)
            return await maker.threads.run_admitted(vectors.rows.size, lambda: embeddings_json(body, plan, vectors))

        return WholeResponse(work, meter, terms)

    app.add_api_route("/v1/embeddings", embeddings, methods=["POST"], response_model=None)


def embeddings_json(body: EmbeddingBody, plan: EmbeddingPlan, vectors: Vectors) -> bytes:
    """The answer to `body`, as JSON."""
    rows = vectors.rows
    told: list[list[float] | str]
    if body.encoding_format == "base64":
        told = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in rows]
    else:
        told = rows.tolist()
    answer = EmbeddingList(
        object="list",
        data=[Embedding(object="embedding", index=i, embedding=one) for i, one in enumerate(told)],
        model=plan.model,
        usage=EmbeddingUsage(prompt_tokens=vectors.num_tokens, total_tokens=vectors.num_tokens),
    )
    return answer.to_json()

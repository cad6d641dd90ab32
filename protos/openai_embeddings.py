"""What POST /v1/embeddings accepts and answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from protos.openai import Prompt
from protos.openai_answers import Answer
from protos.openai_body import Body, RefusedField

MAX_INPUTS = 2048


class EmbeddingBody(Body):
    """`input`: a text, a list of token ids, or a list of at most 2,048 of either.

    Beyond OpenAI's fields: `pooling` ("last" or "mean"; the operator's choice where it is not given), `normalize`
    (whether vectors get length 1), and vLLM's `truncate_prompt_tokens` (the last so many tokens of an input; -1: as
    many as fit), `add_special_tokens` and `priority`.
    """

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    pooling: Literal["last", "mean"] | None = None
    normalize: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    user: str | None = None

    @model_validator(mode="after")
    def _in_bounds(self) -> EmbeddingBody:
        if len(self.input) > MAX_INPUTS and isinstance(self.input[0], str | list) and not isinstance(self.input, str):
            raise RefusedField("input", f"input has {len(self.input)} texts; at most {MAX_INPUTS} are taken")
        if self.truncate_prompt_tokens == 0:
            raise RefusedField(
                "truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for what fits"
            )
        return self


class Embedding(Answer):
    """`embedding`: numbers, or the base64 of float32 in little-endian order."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage

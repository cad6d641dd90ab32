"""The HTTP endpoints: what each takes and gives. A test compares the list with the application's routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protos import (
    openai,
    openai_adapters,
    openai_answers,
    openai_embeddings,
    openai_response_answers,
    openai_responses,
    openai_sessions,
)
from protos.openai_answers import Answer
from protos.openai_batches import Batch, BatchBody, BatchList, FileCard, FileDeleted, FileList
from protos.openai_body import Body


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`bodies`: what it accepts, one of them. `answers`: what it gives, as a whole and as chunk of a stream."""

    method: str
    path: str
    what: str
    bodies: tuple[type[Body], ...] = ()
    answers: tuple[type[Answer], ...] = ()

    @property
    def streams(self) -> bool:
        """Whether the answer may come as Server-Sent Events."""
        return any("stream" in body.model_fields for body in self.bodies)


ENDPOINTS: Final = (
    Endpoint(
        "POST", "/v1/completions", "goes on with a prompt", (openai.CompletionBody,), (openai_answers.Completion,)
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        "answers a conversation",
        (openai.ChatBody,),
        (openai_answers.ChatCompletion, openai_answers.ChatChunk),
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        "answers a conversation in OpenAI's newer words; its stream is of named events",
        (openai_responses.ResponsesBody,),
        (openai_response_answers.Response,),
    ),
    Endpoint(
        "POST",
        "/v1/embeddings",
        "vectors of texts",
        (openai_embeddings.EmbeddingBody,),
        (openai_embeddings.EmbeddingList,),
    ),
    Endpoint("POST", "/v1/files", "keeps a file (multipart/form-data: `purpose` batch, and `file`)", (), (FileCard,)),
    Endpoint("GET", "/v1/files", "the key's files (`limit`, `after`, `order` asc or desc, `purpose`)", (), (FileList,)),
    Endpoint("GET", "/v1/files/{file_id}", "one file", (), (FileCard,)),
    Endpoint("DELETE", "/v1/files/{file_id}", "forgets it", (), (FileDeleted,)),
    Endpoint("GET", "/v1/files/{file_id}/content", "its bytes"),
    Endpoint("POST", "/v1/batches", "answers every line of a file in idle capacity", (BatchBody,), (Batch,)),
    Endpoint("GET", "/v1/batches", "the key's batches (`limit`, `after`)", (), (BatchList,)),
    Endpoint("GET", "/v1/batches/{batch_id}", "one batch", (), (Batch,)),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", "ends it; what has an answer keeps it", (), (Batch,)),
    Endpoint("GET", "/v1/models", "the models that are served", (), (openai_answers.ModelList,)),
    Endpoint("GET", "/v1/models/{name}", "one of them", (), (openai_answers.ModelCard,)),
    Endpoint(
        "POST",
        "/tokenize",
        "token ids of a text or a conversation",
        (openai.TokenizeTextBody, openai.TokenizeChatBody),
        (openai_answers.Tokenized,),
    ),
    Endpoint("POST", "/detokenize", "the text of token ids", (openai.DetokenizeBody,), (openai_answers.Detokenized,)),
    Endpoint("POST", "/v1/sessions", "opens a session", (openai_sessions.OpenBody,), (openai_answers.SessionCard,)),
    Endpoint("GET", "/v1/sessions", "the key's open sessions", (), (openai_answers.SessionList,)),
    Endpoint("GET", "/v1/sessions/{session_id}", "one session", (), (openai_answers.SessionCard,)),
    Endpoint("DELETE", "/v1/sessions/{session_id}", "closes it", (), (openai_answers.SessionDeleted,)),
    Endpoint(
        "POST",
        "/v1/sessions/{session_id}/fork",
        "a session of its own with the first tokens of this one",
        (openai_sessions.ForkBody,),
        (openai_answers.SessionCard,),
    ),
    Endpoint(
        "POST",
        "/v1/load_lora_adapter",
        "loads an [adapter](lora.md) at every worker; for an admin's key",
        (openai_adapters.LoadAdapterBody,),
    ),
    Endpoint(
        "POST",
        "/v1/unload_lora_adapter",
        "takes no more requests for it; those that run end as they would",
        (openai_adapters.UnloadAdapterBody,),
    ),
    Endpoint("GET", "/health", "200 as long as the service lives and has served; 503 before"),
    Endpoint("GET", "/ready", "200 while requests are taken; 503 while starting, draining or without a worker"),
    Endpoint("GET", "/version", "the version"),
    Endpoint("GET", "/metrics", "[metrics](metrics.md) in Prometheus' or OpenMetrics' format"),
    Endpoint("GET", "/debug/fleet", "what this gateway knows ([looking inside](looking_inside.md))"),
    Endpoint("GET", "/debug/kv", "cells and sequences of every worker"),
    Endpoint("GET", "/debug/plan", "the last steps of every worker, explained"),
    Endpoint("GET", "/openapi.json", "these endpoints for programs, as an OpenAPI document"),
    Endpoint("GET", "/", "the page"),
)

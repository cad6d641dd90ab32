"""The two shapes in which an answer is told: /v1/completions' and /v1/chat/completions', whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from cluster.answers.answer import TokenCounts
from cluster.answers.choice import Piece, ScoredToken
from cluster.language.detokeniser import TokenBytes
from cluster.language.message_parts import Part
from cluster.language.message_reader import MessageReader, NewReader
from cluster.web.json_parts import json_columns, json_list, json_object, with_fields
from cluster.web.message_wire import delta_of, message_of
from cluster.web.prompt_voice import PromptVoice, finite
from planner.request import TokenLogprobs
from protos import openai_answers as wire


class Voice(Protocol):
    """Turns what an answer says into JSON. Owner: one answer; every text it makes has the same id and time."""

    def chunk(self, piece: Piece, counts: TokenCounts | None = None) -> bytes | None:
        """One chunk of a stream, and the counts with it; None where the piece has nothing to tell."""
        ...

    def usage_chunk(self, counts: TokenCounts) -> bytes:
        """The chunk without choices that closes a stream."""
        ...

    def whole(self, choices: Sequence[Sequence[Piece]], counts: TokenCounts) -> bytes:
        """The answer at once: all pieces of every choice, in order."""
        ...


class CompletionVoice:
    """/v1/completions. `scored`: log probabilities were asked for. `prompt`: tells of prompts and token ids. `name`:
    the text that names a token by its id."""

    def __init__(self, model: str, name: Callable[[int], str], prompt: PromptVoice, *, scored: bool) -> None:
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._name = name
        self._scored = scored
        self._prompt = prompt
        self._opened: set[int] = set()
        self._frame = _Frame(self._envelope())

    def chunk(self, piece: Piece, counts: TokenCounts | None = None) -> bytes | None:
        if _is_silent(piece) and not (self._prompt.tells_ids and piece.tokens):
            return None
        opens = piece.index not in self._opened
        self._opened.add(piece.index)
        return self._frame.around([self._choice(piece.index, [piece], opens=opens)], counts)

    def usage_chunk(self, counts: TokenCounts) -> bytes:
        return self._envelope().model_copy(update={"usage": usage(counts)}).to_json()

    def whole(self, choices: Sequence[Sequence[Piece]], counts: TokenCounts) -> bytes:
        return self._frame.around([self._choice(*numbered, opens=True) for numbered in enumerate(choices)], counts)

    def _envelope(self) -> wire.Completion:
        return wire.Completion(
            id=self._id, object="text_completion", created=self._created, model=self._model, choices=[]
        )

    def _choice(self, index: int, pieces: Sequence[Piece], *, opens: bool) -> bytes:
        """`opens`: the prompt is told, too."""
        choice = wire.CompletionChoice(
            index=index,
            text="".join(piece.text for piece in pieces),
            logprobs=None,
            finish_reason=_finish_reason(pieces),
        )
        news = self._prompt.tokens(pieces) | (self._prompt.prompt(index) if opens else {})
        scores = self._prompt.scores(index) if opens else {}
        if self._scored:
            scores["logprobs"] = self._logprobs([score for piece in pieces for score in piece.scores])
        return with_fields(choice.model_copy(update=news), scores)

    def _logprobs(self, scores: Sequence[ScoredToken]) -> bytes:
        """As `wire.CompletionLogprobs`."""
        known = (None if (p := score.logprobs.logprob) is None else finite(p) for score in scores)
        columns: dict[str, Iterable[object]] = {
            "tokens": (self._name(score.logprobs.token) for score in scores),
            "token_logprobs": known,
            "top_logprobs": (self._alternatives(score.logprobs) for score in scores),
            "text_offset": (score.offset for score in scores),
        }
        return json_columns(len(scores), columns)

    def _alternatives(self, score: TokenLogprobs) -> dict[str, float] | None:
        """The most likely tokens and, as OpenAI has it, the chosen one."""
        if score.logprob is None:
            return None
        pairs = [*score.top, (score.token, score.logprob)]
        best: dict[str, float] = {}
        for token, logprob in pairs:
            best.setdefault(self._name(token), finite(logprob))
        return best


class ChatVoice:
    """/v1/chat/completions. A choice's first chunk carries the role. `name`: the text that names a token by its id.

    `new_reader` makes what finds thoughts and calls of tools in a choice's text; None: all of it is content."""

    def __init__(
        self,
        model: str,
        tokens: TokenBytes,
        name: Callable[[int], str],
        prompt: PromptVoice,
        *,
        scored: bool,
        new_reader: NewReader | None = None,
    ) -> None:
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._tokens = tokens
        self._name = name
        self._scored = scored
        self._prompt = prompt
        self._new_reader = new_reader or MessageReader
        self._readers: dict[int, MessageReader] = {}  # of the choices that have begun
        self._frame = _Frame(self._chunk())

    def chunk(self, piece: Piece, counts: TokenCounts | None = None) -> bytes | None:
        opens = piece.index not in self._readers
        parts = self._read([piece])
        tells_ids = self._prompt.tells_ids and piece.tokens
        if not (opens or parts or piece.scores or tells_ids) and piece.ending is None:
            return None
        delta, reason = delta_of(parts, opens=opens), self._finish_reason([piece])
        choice = wire.ChatChunkChoice(index=piece.index, delta=delta, logprobs=None, finish_reason=reason)
        news = self._prompt.tokens([piece]) | (self._prompt.prompt(piece.index) if opens else {})
        return self._frame.around([with_fields(choice.model_copy(update=news), self._scores([piece]))], counts)

    def usage_chunk(self, counts: TokenCounts) -> bytes:
        return self._chunk().model_copy(update={"usage": usage(counts)}).to_json()

    def whole(self, choices: Sequence[Sequence[Piece]], counts: TokenCounts) -> bytes:
        told = []
        for index, pieces in enumerate(choices):
            parts = self._read(pieces)
            reason = self._finish_reason(pieces)
            assert reason is not None, "only finished choices are told at once"
            choice = wire.ChatChoice(index=index, message=message_of(parts), logprobs=None, finish_reason=reason)
            told.append(with_fields(choice.model_copy(update=self._prompt.tokens(pieces)), self._scores(pieces)))
        answer = wire.ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[],
            usage=usage(counts),
        )
        fields = {"choices": b"[" + b",".join(told) + b"]"} | self._prompt.scores(0)
        return with_fields(answer.model_copy(update=self._prompt.prompt(0)), fields)

    def _read(self, pieces: Sequence[Piece]) -> list[Part]:
        """The parts that the next pieces of one choice turn out to be."""
        parts: list[Part] = []
        for piece in pieces:
            reader = self._readers.get(piece.index) or self._readers.setdefault(piece.index, self._new_reader())
            parts += reader.push(piece.text)
            if piece.ending is not None:
                parts += reader.finish()
        return parts

    def _finish_reason(self, pieces: Sequence[Piece]) -> wire.FinishReasonName | None:
        reason = _finish_reason(pieces)
        return "tool_calls" if reason == "stop" and self._readers[pieces[-1].index].num_calls else reason

    def _chunk(self) -> wire.ChatChunk:
        return wire.ChatChunk(
            id=self._id, object="chat.completion.chunk", created=self._created, model=self._model, choices=[]
        )

    def _scores(self, pieces: Sequence[Piece]) -> dict[str, bytes]:
        """As `wire.ChatLogprobs`; none where none were asked for."""
        if not self._scored:
            return {}
        scores = (self._score(score.logprobs) for piece in pieces for score in piece.scores)
        return {"logprobs": json_object({"content": json_list(scores), "refusal": b"null"})}

    def _score(self, score: TokenLogprobs) -> dict[str, Any]:
        """As a `wire.TokenLogprob`."""
        told = self._named(score.token, 0.0 if score.logprob is None else score.logprob)
        told["top_logprobs"] = [self._named(token, logprob) for token, logprob in score.top]
        return told

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": finite(logprob), "bytes": self._bytes(token)}

    def _bytes(self, token: int) -> list[int] | None:
        return None if token in self._tokens.special else list(self._tokens.of(token))


class _Frame:
    """The JSON around choices, written once: it is the same for all chunks of a stream."""

    def __init__(self, empty: wire.Completion | wire.ChatChunk) -> None:
        self._head = empty.to_json().removesuffix(b"]}")

    def around(self, choices: Sequence[bytes], counts: TokenCounts | None) -> bytes:
        tail = b"]}" if counts is None else b'],"usage":' + usage(counts).to_json() + b"}"
        return self._head + b",".join(choices) + tail


def usage(counts: TokenCounts) -> wire.Usage:
    """OpenAI's token counts."""
    return wire.Usage(
        prompt_tokens=counts.prompt,
        completion_tokens=counts.completion,
        total_tokens=counts.prompt + counts.completion,
        prompt_tokens_details=wire.PromptTokensDetails(cached_tokens=counts.cached),
    )


def _is_silent(piece: Piece) -> bool:
    return not piece.text and not piece.scores and piece.ending is None


def _finish_reason(pieces: Sequence[Piece]) -> wire.FinishReasonName | None:
    ending = pieces[-1].ending if pieces else None
    return None if ending is None else ending.value

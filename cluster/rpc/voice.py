"""The shape in which an answer is told to gRPC clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from cluster.answers.answer import TokenCounts
from cluster.answers.choice import Ending, Piece, ScoredToken
from cluster.language.detokeniser import TokenBytes
from cluster.language.message_parts import CallNews, Content, Reasoning, call_news, text_of
from cluster.language.message_reader import MessageReader, NewReader
from cluster.web.prompt_voice import finite
from protos import inference_pb2 as pb

_REASONS: Final = {Ending.STOP: pb.FINISH_REASON_STOP, Ending.LENGTH: pb.FINISH_REASON_LENGTH}


class GrpcVoice:
    """Turns what an answer says into messages. Owner: one answer.

    `new_reader` makes what finds thoughts and calls of tools in a choice's text; None: all of it is text."""

    def __init__(self, tokens: TokenBytes, new_reader: NewReader | None = None) -> None:
        self._tokens = tokens
        self._num_tokens: Counter[int] = Counter()
        self._new_reader = new_reader
        self._readers: dict[int, MessageReader] = {}

    def message(self, pieces: Sequence[Piece], counts: TokenCounts, *, last: bool) -> pb.GenerateResponse | None:
        """News of all choices in one message; None when there are none. `last`: nothing comes after it."""
        choices = [self._choice(piece, counts) for piece in pieces if not _is_silent(piece)]
        if not choices and not last:
            return None
        return pb.GenerateResponse(choices=choices, usage=_usage(counts, counts.completion) if last else None)

    def _choice(self, piece: Piece, counts: TokenCounts) -> pb.Choice:
        self._num_tokens[piece.index] += len(piece.tokens)
        choice = pb.Choice(index=piece.index, token_ids=piece.tokens)
        choice.logprobs.extend(self._logprobs(score) for score in piece.scores)
        if piece.ending is not None:
            choice.finish_reason = _REASONS[piece.ending]
            choice.usage.CopyFrom(_usage(counts, self._num_tokens[piece.index]))
        if self._new_reader is None:
            choice.text = piece.text
        else:
            self._read(piece, self._new_reader, choice)
        return choice

    def _read(self, piece: Piece, new_reader: NewReader, choice: pb.Choice) -> None:
        """Put what the piece's text turns out to be into the choice."""
        reader = self._readers.get(piece.index) or self._readers.setdefault(piece.index, new_reader())
        parts = reader.push(piece.text) + (reader.finish() if piece.ending is not None else [])
        choice.text, choice.reasoning = text_of(parts, Content), text_of(parts, Reasoning)
        choice.tool_calls.extend(_call_delta(news) for news in call_news(parts))
        if piece.ending is Ending.STOP and reader.num_calls:
            choice.finish_reason = pb.FINISH_REASON_TOOL_CALLS

    def _logprobs(self, score: ScoredToken) -> pb.TokenLogprobs:
        told = score.logprobs
        return pb.TokenLogprobs(
            chosen=self._logprob(told.token, 0.0 if told.logprob is None else told.logprob),
            top=[self._logprob(token, logprob) for token, logprob in told.top],
            text_offset=score.offset,
        )

    def _logprob(self, token: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token, logprob=finite(logprob), text=self._tokens.of(token))


def _call_delta(news: CallNews) -> pb.ToolCallDelta:
    begun = {} if news.begun is None else {"id": news.begun.id, "name": news.begun.name}
    return pb.ToolCallDelta(index=news.index, arguments=news.arguments, **begun)


def _usage(counts: TokenCounts, num_tokens: int) -> pb.Usage:
    return pb.Usage(prompt_tokens=counts.prompt, completion_tokens=num_tokens, cached_tokens=counts.cached)


def _is_silent(piece: Piece) -> bool:
    return not piece.text and not piece.tokens and not piece.scores and piece.ending is None

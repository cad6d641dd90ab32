"""The shape in which an answer is told to gRPC clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from cluster.answers.answer import TokenCounts
from cluster.answers.choice import Ending, Piece
from cluster.language.detokeniser import TokenBytes
from cluster.language.message_parts import CallNews, Content, Reasoning, call_news, text_of
from cluster.language.message_reader import MessageReader, NewReader
from cluster.web.prompt_voice import finite
from planner.request import TokenLogprobs
from protos import inference_pb2 as pb

_REASONS: Final = {Ending.STOP: pb.FINISH_REASON_STOP, Ending.LENGTH: pb.FINISH_REASON_LENGTH}


class GrpcVoice:
    """Turns what an answer says into messages. Owner: one answer.

    `scored`: log probabilities are told, with so many alternatives as they have. `num_prompt_top`: so many alternatives
    of each token of the prompt; None: nothing of it. `new_reader` makes what finds thoughts and calls of tools in a
    choice's text; None: all of it is text."""

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        scored: bool,
        num_prompt_top: int | None = None,
        new_reader: NewReader | None = None,
    ) -> None:
        self._tokens = tokens
        self._scored = scored
        self._num_prompt_top = num_prompt_top
        self._num_tokens: Counter[int] = Counter()
        self._new_reader = new_reader
        self._readers: dict[int, MessageReader] = {}

    def message(self, pieces: Sequence[Piece], counts: TokenCounts) -> pb.GenerateResponse | None:
        """News of all choices in one message; None when there are none."""
        choices = [self._choice(piece, counts) for piece in pieces if not _is_silent(piece)]
        return pb.GenerateResponse(choices=choices) if choices else None

    def last_message(
        self, pieces: Sequence[Piece], counts: TokenCounts, prompt: Sequence[TokenLogprobs]
    ) -> pb.GenerateResponse:
        """What is told at the end; `prompt` are the log probabilities of its tokens, as far as there are any."""
        message = self.message(pieces, counts) or pb.GenerateResponse()
        message.usage.CopyFrom(_usage(counts, counts.completion))
        if self._num_prompt_top is not None:
            message.prompt_logprobs.extend(self._logprobs(told, num_top=self._num_prompt_top) for told in prompt)
        return message

    def _choice(self, piece: Piece, counts: TokenCounts) -> pb.Choice:
        self._num_tokens[piece.index] += len(piece.tokens)
        choice = pb.Choice(index=piece.index, token_ids=piece.tokens)
        if self._scored:
            choice.logprobs.extend(self._logprobs(score.logprobs, offset=score.offset) for score in piece.scores)
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

    def _logprobs(self, told: TokenLogprobs, *, offset: int = 0, num_top: int | None = None) -> pb.TokenLogprobs:
        return pb.TokenLogprobs(
            chosen=self._logprob(told.token, told.logprob),
            top=[self._logprob(token, logprob) for token, logprob in told.top[:num_top]],
            text_offset=offset,
        )

    def _logprob(self, token: int, logprob: float | None) -> pb.TokenLogprob:
        known = None if logprob is None else finite(logprob)
        return pb.TokenLogprob(token_id=token, logprob=known, text=self._tokens.of(token))


def _call_delta(news: CallNews) -> pb.ToolCallDelta:
    begun = {} if news.begun is None else {"id": news.begun.id, "name": news.begun.name}
    return pb.ToolCallDelta(index=news.index, arguments=news.arguments, **begun)


def _usage(counts: TokenCounts, num_tokens: int) -> pb.Usage:
    return pb.Usage(prompt_tokens=counts.prompt, completion_tokens=num_tokens, cached_tokens=counts.cached)


def _is_silent(piece: Piece) -> bool:
    return not piece.text and not piece.tokens and not piece.scores and piece.ending is None

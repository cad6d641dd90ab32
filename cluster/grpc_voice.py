"""The shape in which an answer is told to gRPC clients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from cluster.answer import TokenCounts
from cluster.choice import Ending, Piece, ScoredToken
from cluster.detokeniser import TokenBytes
from cluster.prompt_voice import finite
from protos import inference_pb2 as pb

_REASONS: Final = {Ending.STOP: pb.FINISH_REASON_STOP, Ending.LENGTH: pb.FINISH_REASON_LENGTH}


class GrpcVoice:
    """Turns what an answer says into messages. Owner: one answer."""

    def __init__(self, tokens: TokenBytes) -> None:
        self._tokens = tokens
        self._num_tokens: Counter[int] = Counter()

    def message(self, pieces: Sequence[Piece], counts: TokenCounts, *, last: bool) -> pb.GenerateResponse | None:
        """News of all choices in one message; None when there are none. `last`: nothing comes after it."""
        choices = [self._choice(piece, counts) for piece in pieces if not _is_silent(piece)]
        if not choices and not last:
            return None
        return pb.GenerateResponse(choices=choices, usage=_usage(counts, counts.completion) if last else None)

    def _choice(self, piece: Piece, counts: TokenCounts) -> pb.Choice:
        self._num_tokens[piece.index] += len(piece.tokens)
        choice = pb.Choice(index=piece.index, text=piece.text, token_ids=piece.tokens)
        choice.logprobs.extend(self._logprobs(score) for score in piece.scores)
        if piece.ending is not None:
            choice.finish_reason = _REASONS[piece.ending]
            choice.usage.CopyFrom(_usage(counts, self._num_tokens[piece.index]))
        return choice

    def _logprobs(self, score: ScoredToken) -> pb.TokenLogprobs:
        told = score.logprobs
        return pb.TokenLogprobs(
            chosen=self._logprob(told.token, 0.0 if told.logprob is None else told.logprob),
            top=[self._logprob(token, logprob) for token, logprob in told.top],
            text_offset=score.offset,
        )

    def _logprob(self, token: int, logprob: float) -> pb.TokenLogprob:
        return pb.TokenLogprob(token_id=token, logprob=finite(logprob), text=self._tokens.of(token))


def _usage(counts: TokenCounts, num_tokens: int) -> pb.Usage:
    return pb.Usage(prompt_tokens=counts.prompt, completion_tokens=num_tokens, cached_tokens=counts.cached)


def _is_silent(piece: Piece) -> bool:
    return not piece.text and not piece.tokens and not piece.scores and piece.ending is None

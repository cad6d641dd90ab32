"""What an answer says of its prompt and of token ids, for clients that asked: vLLM's fields beside OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from cluster.answers.answer import Answer
from cluster.answers.choice import Piece
from cluster.language.detokeniser import TokenBytes
from cluster.web.json_parts import json_list
from planner.request import TokenLogprobs
from protos.openai import GenerationBody

LOWEST_LOGPROB: Final = -9999.0  # JSON has no infinity; the number that OpenAI's own answers use


class PromptVoice:
    """Owner: one answer's voice. Every method gives fields to add; none where nothing was asked for. `scores` are JSON
    already."""

    def __init__(self, answer: Answer, tokens: TokenBytes, body: GenerationBody) -> None:
        self._answer = answer
        self._tokens = tokens
        self._ids = body.return_token_ids
        self._num_top = body.prompt_logprobs

    def prompt(self, index: int) -> dict[str, Any]:
        """The prompt of the index-th choice."""
        return {"prompt_token_ids": list(self._answer.prompt_of(index).ids)} if self._ids else {}

    def scores(self, index: int) -> dict[str, bytes]:
        """The log probabilities of the index-th choice's prompt."""
        if (num_top := self._num_top) is None:
            return {}
        scores = self._answer.prompt_of(index).scores
        return {"prompt_logprobs": json_list(self._scored(score, num_top) for score in scores)}

    def tokens(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The token ids of these pieces of a choice."""
        return {"token_ids": list(chain.from_iterable(piece.tokens for piece in pieces))} if self._ids else {}

    @property
    def tells_ids(self) -> bool:
        """Whether a piece has something to tell as soon as it has tokens."""
        return self._ids

    def _scored(self, score: TokenLogprobs, num_top: int) -> dict[str, dict[str, Any]] | None:
        """As a `wire.PromptLogprob` for each token."""
        if score.logprob is None:
            return None
        found = {token: (logprob, rank) for rank, (token, logprob) in enumerate(score.top[:num_top], 1)}
        own = found.pop(score.token, (score.logprob, None))
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self._tokens.name(token)}
            for token, (logprob, rank) in ((score.token, own), *found.items())
        }


def finite(logprob: float) -> float:
    """The log probability, with the impossible told as a number that JSON has."""
    return max(logprob, LOWEST_LOGPROB)

"""Log probabilities of prompts' tokens, from what the last layer gave in their rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from worker.batch import Piece
from worker.cuda.failures import Failures
from worker.cuda.outcomes import StepRun
from worker.logprobs import token_logprobs
from worker.models.decoder import Decoder

# Rows that are computed at once: 64 rows of 128 Ki float32 are 32 MiB.
_ROWS = 64


class PromptScores:
    """Owner and only caller: the executor. Waits for the device: these are rare, and many."""

    def __init__(self, decoder: Decoder, failures: Failures) -> None:
        self._decoder, self._failures = decoder, failures

    def score(self, pieces: Sequence[Piece], hidden: Tensor, run: StepRun) -> None:
        """`hidden` [K, E] has the rows of all pieces' targets, in order. Sequences whose scores have no room, or are
        not finite, fail."""
        at = 0
        for piece in pieces:
            with self._failures.room_for(run, [piece.index], "scoring a prompt"):
                self._score(piece, hidden[at : at + len(piece.targets)], run)
            at += len(piece.targets)

    def _score(self, piece: Piece, hidden: Tensor, run: StepRun) -> None:
        num_top = piece.chunk.sampling.logprobs or 0
        for first in range(0, len(piece.targets), _ROWS):
            targets = piece.targets[first : first + _ROWS].tolist()
            logits = self._decoder.logits(hidden[first : first + len(targets)])
            if not bool(logits.sum().isfinite()):
                self._failures.fail(run, [piece.index], "the forward gave logits that are not finite")
                return
            run.score_prompt(piece.index, token_logprobs(logits, targets, [num_top] * len(targets)))

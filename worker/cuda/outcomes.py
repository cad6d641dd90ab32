"""What a step on the GPU has given so far, and the part of it that is still on its way to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planner.errors import ForwardFailed, RequestFailed
from planner.request import TokenLogprobs, Vector
from planner.step import Chunk, ChunkOutput
from worker.cuda.decode_state import PendingTokens, RowFault
from worker.dead_ends import no_token_left
from worker.logprobs import token_logprobs


@dataclass(frozen=True, slots=True)
class Drawn:
    """One forward's tokens. Row r is the draw of the step's chunk `indices[r]`; `logits` float32[n, vocab_size] are
    those of the rows `scored` (n of them), whose log probabilities are wanted."""

    indices: Sequence[int]
    pending: PendingTokens
    scored: Sequence[int] = ()
    logits: Tensor | None = None


class StepRun:
    """The outcomes of one step in the making. Owner: the executor."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.chunks = chunks
        self.drawn: list[Drawn] = []
        self._errors: dict[int, RequestFailed] = {}
        self._prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._pooled: dict[int, Tensor] = {}
        self._forced: dict[int, tuple[int, ...]] = {}  # by sequence

    def is_whole(self, index: int) -> bool:
        """Whether no forward that held the chunk has failed."""
        return index not in self._errors

    def fail(self, indices: Iterable[int], message: str) -> None:
        for index in indices:
            self._errors.setdefault(index, ForwardFailed(message))

    def give_up(self, index: int, error: RequestFailed) -> None:
        """The chunk's sequence cannot go on, though its forward went well."""
        self._errors.setdefault(index, error)

    def drawn_tokens(self) -> dict[int, int]:
        """By sequence, what was drawn, but for tokens that mean nothing. Waits until the tokens are here."""
        found: dict[int, int] = {}
        for drawn in self.drawn:
            drawn.pending.wait()
            rows = zip(drawn.indices, drawn.pending.tokens.tolist(), drawn.pending.bad.tolist(), strict=True)
            found |= {self.chunks[index].sequence_id: token for index, token, is_bad in rows if not is_bad}
        return found

    def force(self, sequence_id: int, tokens: tuple[int, ...]) -> None:
        """A grammar leaves no choice in `tokens`: the one that the sequence draws in this step, if it draws that one,
        and what has to follow it."""
        self._forced[sequence_id] = tokens

    def score_prompt(self, index: int, scores: Iterable[TokenLogprobs]) -> None:
        """Further log probabilities of a chunk's prompt tokens, in order."""
        self._prompt_logprobs.setdefault(index, []).extend(scores)

    def pool(self, index: int, share: Tensor) -> None:
        """What a further forward has of a chunk's vector, float32[E] on the device."""
        before = self._pooled.get(index)
        self._pooled[index] = share if before is None else before + share

    def outcomes(self) -> list[ChunkOutput | RequestFailed]:
        """One a chunk. Waits until the tokens are here."""
        if len(self.drawn) == 1 and len(self.drawn[0].indices) == len(self.chunks) and not self._errors:
            drawn = self.drawn[0]
            drawn.pending.wait()
            if not (drawn.scored or self._prompt_logprobs or self._forced or drawn.pending.bad.any()):
                return [ChunkOutput(token) for token in drawn.pending.tokens.tolist()]
        tokens: dict[int, int] = {}
        scores: dict[int, TokenLogprobs] = {}
        for drawn in self.drawn:
            self._read(drawn, tokens, scores)
        vectors = {index: pooled.cpu().numpy() for index, pooled in self._pooled.items()}  # waits for the device
        bad = [index for index, vector in vectors.items() if not np.isfinite(vector).all()]
        self.fail(bad, "the forward gave hidden states that are not finite")
        return [
            self._errors.get(index) or self._output(index, tokens, scores, vectors) for index in range(len(self.chunks))
        ]

    def _read(self, drawn: Drawn, tokens: dict[int, int], scores: dict[int, TokenLogprobs]) -> None:
        drawn.pending.wait()
        rows = drawn.pending.tokens.tolist()
        tokens.update(zip(drawn.indices, rows, strict=True))
        for index, fault in zip(drawn.indices, drawn.pending.bad.tolist(), strict=True):
            if not fault:
                continue
            if fault & RowFault.NOT_FINITE:
                self.fail([index], "the forward gave logits that are not finite")
            else:
                self.give_up(index, no_token_left(self.chunks[index]))
        if drawn.logits is not None:
            indices = [drawn.indices[row] for row in drawn.scored]
            num_top = [self.chunks[index].sampling.logprobs or 0 for index in indices]
            try:
                found = token_logprobs(drawn.logits, [rows[row] for row in drawn.scored], num_top)
            except torch.OutOfMemoryError as error:
                self.fail(indices, f"log probabilities did not fit into the GPU's memory: {error}")
            else:
                scores.update(zip(indices, found, strict=True))

    def _output(
        self, index: int, tokens: dict[int, int], scores: dict[int, TokenLogprobs], vectors: dict[int, Vector]
    ) -> ChunkOutput:
        token, prompt_logprobs = tokens.get(index), tuple(self._prompt_logprobs.get(index, ()))
        known = self._forced.get(self.chunks[index].sequence_id, ())
        forced = known[1:] if known[:1] == (token,) else ()
        return ChunkOutput(token, scores.get(index), prompt_logprobs, vectors.get(index), forced)

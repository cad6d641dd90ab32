"""Runs steps one slice after the other, to the end before `launch` returns, by whatever runs its forwards.

With an eager decoder it is the embedded default on the CPU and the oracle that other executors are compared with; with
an exported program it runs that. It works on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from planner.errors import ForwardFailed, GrammarFailed, RequestFailed
from planner.request import Request, TokenLogprobs
from planner.slices import Slice
from planner.step import Chunk, ChunkOutput, Step, StepResult
from worker.adapters import AdapterSlots
from worker.batch import Batch, Piece, cut, selector
from worker.cell_image import CellPort
from worker.cpu.race import compile_cpu_race
from worker.dead_ends import no_token_left
from worker.executor import ProgramInfo
from worker.forwards import Forwards, SelectedLogits
from worker.logprobs import token_logprobs
from worker.masks import BitMask, MaskMaker, NoMasks, constrained_row
from worker.race import torch_race
from worker.sampler import Draw, DrawRows, sample
from worker.swap import SwapSpace, run_swaps

# Rows of prompt log probabilities that are computed at once: 64 rows of 128 Ki float32 are 32 MiB.
_LOGPROB_ROWS = 64

Masks = Mapping[int, BitMask | GrammarFailed]
"""By index of the chunk, for those that follow a grammar."""

Forced = Mapping[int, tuple[int, ...]]
"""By index of the chunk: the token that it must draw, and what must follow."""


class _ChunkRun:
    """What one chunk of the running step has given so far."""

    def __init__(self) -> None:
        self.token: int | None = None
        self.forced: tuple[int, ...] = ()
        self.logprobs: TokenLogprobs | None = None
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled: Tensor | None = None  # float32[E]
        self.error: RequestFailed | None = None

    @property
    def outcome(self) -> ChunkOutput | RequestFailed:
        pooled = None if self.pooled is None else self.pooled.cpu().numpy()
        return self.error or ChunkOutput(self.token, self.logprobs, tuple(self.prompt_logprobs), pooled, self.forced)


class TorchExecutor:
    """An `Executor`; see `worker.executor`. One step in flight, which `launch` runs to its end. Where a forward fails,
    the chunks that it held do; an error of a GPU itself is the executor's end."""

    def __init__(
        self,
        info: ProgramInfo,
        forwards: Forwards,
        swap: SwapSpace | None = None,
        grammars: MaskMaker | None = None,
        port: CellPort | None = None,
        adapters: AdapterSlots | None = None,
        draw_rows: DrawRows | None = None,
    ) -> None:
        """`forwards`: of the program that `info` describes; `swap`: with as many blocks as it says, None for none. On
        the CPU this compiles a kernel, once a machine. `grammars` are the executor's own from here on; without them no
        request can have one. `adapters` are those that `forwards` computes with. `draw_rows`: how tokens are drawn; by
        torch unless given."""
        self._info = info
        self._forwards = forwards
        self._swap = swap
        self._port = port
        self._adapters = adapters
        self._draw_rows = draw_rows or partial(sample, race=compile_cpu_race() if info.device == "cpu" else torch_race)
        self._grammars = grammars or NoMasks()
        self._side = ThreadPoolExecutor(1, thread_name_prefix="masks")  # computes masks while a forward runs
        self._masks: Future[tuple[Masks, Forced]] | None = None  # of the running step
        self._result: StepResult | None = None

    @property
    def info(self) -> ProgramInfo:
        return self._info

    @property
    def port(self) -> CellPort | None:
        """Where sequences' cells leave the pool and enter it, between two steps; None where they cannot."""
        return self._port

    @property
    def adapters(self) -> AdapterSlots | None:
        return self._adapters

    @property
    def max_steps_in_flight(self) -> int:
        return 1

    @property
    def num_beats(self) -> int:
        """Layers, and blocks of logits, that were begun: a wide step of a large model takes minutes on a slow CPU."""
        return self._forwards.num_beats

    def prepare(self, request: Request) -> None:
        if request.sampling.grammar is not None:
            self._grammars.prepare(request.sampling.grammar)

    def launch(self, step: Step) -> None:
        assert self._result is None, "the step before has not been collected"
        self._grammars.drop(step.dropped)
        self._begin_masks(step.chunks)
        runs = [_ChunkRun() for _ in step.chunks]
        try:
            with torch.inference_mode():
                run_swaps(self._swap, step)
                for piece_of in step.slices:
                    self._run_slice(step.chunks, piece_of, runs)
        finally:  # also of a forward that failed before it needed them: grammars are one thread's at a time
            if self._masks is not None:
                wait([self._masks])
        self._result = StepResult([run.outcome for run in runs])

    def collect(self) -> StepResult:
        result, self._result = self._result, None
        assert result is not None, "no step was launched"
        return result

    def close(self) -> None:
        self._result = None
        self._side.shutdown()
        self._grammars.close()

    def _begin_masks(self, chunks: Sequence[Chunk]) -> None:
        places = [place for place, chunk in enumerate(chunks) if chunk.samples and chunk.sampling.grammar is not None]
        if not places:
            self._masks = None
            return
        rows = {place: constrained_row(chunks[place]) for place in places}
        open_rows = {place: row for place, row in rows.items() if chunks[place].sampling.may_be_forced}

        def ask() -> tuple[Masks, Forced]:
            masks, forced = self._grammars.masks([*rows.values()]), self._grammars.forced([*open_rows.values()])
            return dict(zip(rows, masks, strict=True)), dict(zip(open_rows, forced, strict=True))

        self._masks = self._side.submit(ask)

    def _run_slice(self, chunks: Sequence[Chunk], piece_of: Slice, runs: list[_ChunkRun]) -> None:
        batch = cut(chunks, piece_of, wanted=lambda index: runs[index].error is None)
        if batch is None:
            return
        try:
            logits = self._forwards.run(batch, piece_of.method, _wanted(batch))
            self._sample(batch, piece_of, logits, runs)
            self._score_prompts(batch, logits, runs)
            _pool(batch, logits, runs)
        except torch.AcceleratorError:  # the device's own, which no later forward of this process gets over
            raise
        except (RuntimeError, IndexError, MemoryError) as error:  # what torch raises for a forward's own fault
            for piece in batch.pieces:
                runs[piece.index].error = ForwardFailed(f"the forward failed: {error}")

    def _sample(self, batch: Batch, piece_of: Slice, selected: SelectedLogits, runs: list[_ChunkRun]) -> None:
        sampled = [(piece, row) for piece in batch.pieces if (row := piece.sampled_row) is not None]
        if not sampled:
            return
        rows = selector([row for _, row in sampled], piece_of.method, self._info.min_prefill_tokens)
        logits = selected.rows(rows)[: len(sampled)]
        pieces = [piece for piece, _ in sampled]
        masks, forced = self._masks.result() if self._masks is not None else ({}, {})
        errors = [
            _row_error(finite, masks.get(p.index)) for finite, p in zip(_finite_rows(logits), pieces, strict=True)
        ]
        if any(errors):
            for piece, error in zip(pieces, errors, strict=True):
                runs[piece.index].error = error
            good_rows = [row for row, error in enumerate(errors) if error is None]
            logits, pieces = logits[good_rows], [pieces[row] for row in good_rows]
        if not pieces:
            return
        drawn = self._draw_rows(logits, [_draw(piece.chunk, masks.get(piece.index)) for piece in pieces])
        tokens = drawn.tokens.tolist()
        for piece, token in zip(pieces, tokens, strict=True):
            run, known = runs[piece.index], forced.get(piece.index, ())
            run.token = token
            if known[:1] == (token,):
                run.forced = known[1:]
        if drawn.nothing_left is not None:
            for row in drawn.nothing_left.nonzero()[:, 0].tolist():
                runs[pieces[row].index].error = no_token_left(pieces[row].chunk)
        asked = [row for row, piece in enumerate(pieces) if piece.chunk.sampling.logprobs is not None]
        if asked:
            num_top = [pieces[row].chunk.sampling.logprobs or 0 for row in asked]
            scores = token_logprobs(logits[asked], [tokens[row] for row in asked], num_top)
            for row, score in zip(asked, scores, strict=True):
                runs[pieces[row].index].logprobs = score

    def _score_prompts(self, batch: Batch, logits: SelectedLogits, runs: list[_ChunkRun]) -> None:
        for piece in batch.pieces:
            if runs[piece.index].error is None:
                for first in range(0, len(piece.targets), _LOGPROB_ROWS):
                    self._score_block(piece, first, logits, runs[piece.index])

    def _score_block(self, piece: Piece, first: int, selected: SelectedLogits, run: _ChunkRun) -> None:
        rows = piece.target_rows[first : first + _LOGPROB_ROWS]
        logits = selected.rows(rows)
        if not all(_finite_rows(logits)):
            run.error = ForwardFailed("the forward gave logits that are not finite")
            return
        targets = piece.targets[first : first + _LOGPROB_ROWS].tolist()
        run.prompt_logprobs += token_logprobs(logits, targets, [piece.chunk.sampling.logprobs or 0] * len(rows))


def _pool(batch: Batch, selected: SelectedLogits, runs: list[_ChunkRun]) -> None:
    """Add to each chunk that pools what this forward has of it."""
    for piece in batch.pieces:
        rows, run = piece.pooled_rows, runs[piece.index]
        if not rows or run.error is not None:
            continue
        share = selected.normed(rows.start, rows.stop).float().sum(dim=0)
        if not bool(share.isfinite().all()):
            run.error = ForwardFailed("the forward gave hidden states that are not finite")
            continue
        run.pooled = share if run.pooled is None else run.pooled + share


def _wanted(batch: Batch) -> list[int]:
    """The rows whose logits a step needs of this forward."""
    sampled = {row for piece in batch.pieces if (row := piece.sampled_row) is not None}
    return sorted(sampled.union(*(piece.target_rows for piece in batch.pieces)))


def _draw(chunk: Chunk, mask: BitMask | GrammarFailed | None) -> Draw:
    position = chunk.start + chunk.length
    if mask is None:
        return Draw(chunk.sampling, position, chunk.history, chunk.num_prompt, chunk.masked)
    assert not isinstance(mask, GrammarFailed), "a row that failed is not drawn"
    return Draw(chunk.sampling, position, chunk.history, chunk.num_prompt, allowed=mask)


def _row_error(finite: bool, mask: BitMask | GrammarFailed | None) -> RequestFailed | None:
    if not finite:
        return ForwardFailed("the forward gave logits that are not finite")
    return mask if isinstance(mask, GrammarFailed) else None


def _finite_rows(logits: Tensor) -> list[bool]:
    # A sum is finite only if all of its terms are: one pass, and nothing the size of the logits is made.
    finite: list[bool] = logits.sum(dim=-1).isfinite().tolist()
    return finite

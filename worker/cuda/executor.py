"""Runs steps on a GPU without waiting for them: what is drawn stays on the device and feeds the next step.

A step of nothing but lone decodes is one replay of a captured graph, however its slices are cut. Any other slice is a
packed forward, captured for few tokens. Both draw into the decode state, and tokens are copied out behind the step.
Rows that want more than the device draws by itself (penalties, bias, masks) are drawn again, from the same logits
changed (`host_draws`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from planner.request import Request
from planner.slices import Method, Slice
from planner.step import Chunk, Step, StepResult
from worker.batch import Piece, cut, selector
from worker.cell_image import CellPort
from worker.cuda.adapted_prefill import Adapted
from worker.cuda.batch_forward import BatchForward
from worker.cuda.decode import CudaDecode
from worker.cuda.decode_buffers import next_power_of_2
from worker.cuda.decode_state import PendingTokens, SlotEntry
from worker.cuda.failures import Failures
from worker.cuda.graphs import Draw
from worker.cuda.host_draws import HostDraws
from worker.cuda.launch import aligned
from worker.cuda.lora import CudaLoraSlots
from worker.cuda.outcomes import Drawn, StepRun
from worker.cuda.prefill import PrefillChain
from worker.cuda.prefill_graphs import PrefillGraphs
from worker.cuda.prompt_scores import PromptScores
from worker.cuda.slots import Slots, slots_needed
from worker.cuda.staging import Moment
from worker.executor import ProgramInfo
from worker.masks import MaskMaker, NoMasks
from worker.models.decoder import Decoder
from worker.pool_growth import PoolGrowth, required_cells
from worker.swap import SwapSpace, run_swaps

# Row tables start at a multiple of 128 bytes, so that one compiled kernel serves any number of rows.
_ALIGNED_ROWS = 32


class CudaExecutor:
    """An `Executor`; see `worker.executor`. Two steps in flight. Everything runs on torch's current stream.

    Where a forward runs out of memory, the chunks that it held fail, and where a draw does, or its log probabilities,
    those that wanted it; any other error of the device is the executor's end. Rows without finite logits, or with
    nothing left to draw, fail alone.
    """

    def __init__(
        self,
        info: ProgramInfo,
        decoder: Decoder,
        prefill: PrefillChain,
        decode: CudaDecode,
        swap: SwapSpace | None = None,
        growth: PoolGrowth | None = None,
        grammars: MaskMaker | None = None,
        port: CellPort | None = None,
        captured: PrefillGraphs | None = None,
        adapted: Adapted | None = None,
    ) -> None:
        """`swap` has as many blocks as `info` says; None for none. `growth` is of a pool that may not have
        all its cells yet; None where it has. `grammars` are the executor's own from here on; without
        them no request can have one. `adapted` is over the adapters that `decode` computes with."""
        self._info = info
        self._swap = swap
        self._port = port
        self._growth = growth
        self._decoder = decoder
        self._adapted = adapted
        self._decode = decode
        self._device = decoder.device
        self._slots = Slots(slots_needed(info.widths[-1]))
        shared_heads = decoder.config.num_heads // decoder.config.num_kv_heads
        self._forward = BatchForward(prefill, captured, adapted, decode, self._slots, shared_heads)
        self._grammars = grammars or NoMasks()
        self._failures = Failures()
        self._host_draws = HostDraws(self._grammars, decode, self._failures)
        self._prompt_scores = PromptScores(decoder, self._failures)
        self._in_flight: deque[StepRun] = deque()

    @property
    def info(self) -> ProgramInfo:
        return self._info

    @property
    def num_beats(self) -> int:
        return 0  # its steps are short

    @property
    def port(self) -> CellPort | None:
        """Where sequences' cells leave the pool and enter it, between two steps; None where they cannot."""
        return self._port

    @property
    def adapters(self) -> CudaLoraSlots | None:
        return None if self._adapted is None else self._adapted.adapters

    @property
    def max_steps_in_flight(self) -> int:
        return 2

    @property
    def has_lost_any(self) -> bool:
        """Whether the device had no memory for a sequence that was not dropped yet."""
        return bool(self._failures)

    def prepare(self, request: Request) -> None:
        if request.sampling.grammar is not None:
            self._grammars.prepare(request.sampling.grammar)

    def launch(self, step: Step) -> None:
        assert len(self._in_flight) < self.max_steps_in_flight
        self._slots.drop(step.dropped)
        self._grammars.drop(step.dropped)
        self._failures.forget(step.dropped)
        run = StepRun(step.chunks)
        with torch.inference_mode():
            run_swaps(self._swap, self._grown_for(step, run))
            if self._is_decode(step):
                with self._failures.room_for(run, range(len(step.chunks)), "the decode"):
                    self._launch_decode(run)
            else:
                self._failures.refuse(run)
                for piece_of in step.slices:
                    self._launch_slice(piece_of, run)
        self._host_draws.tell_forced()
        self._in_flight.append(run)

    def collect(self) -> StepResult:
        with torch.inference_mode():
            return StepResult(self._in_flight.popleft().outcomes())

    def close(self) -> None:
        self._in_flight.clear()
        self._grammars.close()

    def _is_decode(self, step: Step) -> bool:
        if self._failures or not step.slices or any(piece_of.method is not Method.DECODE for piece_of in step.slices):
            return False
        return all(chunk.length == 1 and chunk.samples and chunk.prompt_targets is None for chunk in step.chunks)

    def _grown_for(self, step: Step, run: StepRun) -> Step:
        """Have cells for the step. Where there is no room, what needs the missing ones fails, and what is left of the
        step's copies is returned."""
        if self._growth is None or self._growth.is_done:
            return step
        required = required_cells(step)
        try:
            self._growth.make_room(required)
        except torch.OutOfMemoryError as error:
            num_cells = self._growth.num_cells
            if num_cells >= required:
                raise  # it grew, and then its steps could not be captured again
            written = [(back.sequence_id, back.cells) for back in step.swaps_in]
            written += [(chunk.sequence_id, chunk.cells[chunk.start :]) for chunk in step.chunks]
            lost = {sequence_id for sequence_id, cells in written if (cells >= num_cells).any()}
            self._failures.lose(lost)
            failed = [index for index, chunk in enumerate(step.chunks) if chunk.sequence_id in lost]
            run.fail(failed, f"the pool has {num_cells} cells and no memory for {required}: {error}")
            step = replace(step, swaps_in=tuple(back for back in step.swaps_in if back.sequence_id not in lost))
        return step

    # One graph for all rows.

    def _launch_decode(self, run: StepRun) -> None:
        chunks, state = run.chunks, self._decode.state
        slots, cells, masked, entries = [], [], [], []
        adapters = [] if self._adapted is None else self._adapted.rows_of(chunks)
        for row, chunk in enumerate(chunks):
            slot = self._slots.find(chunk.sequence_id)
            if slot is None:
                slot = self._slots.take(chunk.sequence_id, chunk.sampling)
                entries.append(_entry(slot, chunk))
            slots.append(slot)
            cells.append(chunk.cells.item(chunk.start))
            if chunk.masked:
                masked.append(row)
        state.enter(entries)
        special = self._slots.needing_logits(slots)
        if masked:
            special = sorted({*special, *masked})
        draw = Draw.SAMPLED if special or self._slots.any_random(slots) else Draw.GREEDY
        self._decode.step(slots, cells, draw.adapted if adapters else draw, adapters)
        scored: list[int] = []
        kept = None
        if special:
            draws = self._host_draws.draws(special, run, self._step_before)  # while the forward runs
            logits = self._decode.logits(len(slots))
            self._host_draws.draw_again(run, special, special, draws, logits, slots, state.out_tokens, state.bad_rows)
            scored, kept = self._kept_logits(run, special, special, logits)
        pending = state.fetch_tokens(len(slots))
        run.drawn.append(Drawn(range(len(slots)), pending, scored, kept))

    # One packed forward a slice.

    def _launch_slice(self, piece_of: Slice, run: StepRun) -> None:
        batch = cut(run.chunks, piece_of, wanted=run.is_whole)
        if batch is None:
            return
        drawing = [(piece, row) for piece in batch.pieces if (row := piece.sampled_row) is not None]
        # The library has other kernels for each number of rows, and loads one when it is first used: few numbers, which
        # `warm_up` has all tried.
        least = max(self._info.min_prefill_tokens, min(next_power_of_2(len(drawing)), self._info.widths[-1]))
        drawn_rows = selector([row for _, row in drawing], piece_of.method, least)
        target_rows = [row for piece in batch.pieces for row in piece.target_rows]
        pooled_rows = [row for piece in batch.pieces for row in piece.pooled_rows]
        with self._failures.room_for(run, [piece.index for piece in batch.pieces], "the forward"):
            hidden = self._forward.hidden(batch, [*drawn_rows, *target_rows, *pooled_rows])
            if drawing:
                self._draw_rows([piece for piece, _ in drawing], hidden[: len(drawn_rows)], run)
            if target_rows:
                self._prompt_scores.score(batch.pieces, hidden[len(drawn_rows) :], run)
            if pooled_rows:
                self._pool(batch.pieces, hidden[len(drawn_rows) + len(target_rows) :], run)

    def _draw_rows(self, pieces: Sequence[Piece], hidden: Tensor, run: StepRun) -> None:
        """Draw for pieces that end their chunks; `hidden` has their rows, and maybe some that nobody reads."""
        num_rows = len(pieces)
        logits = self._decoder.logits(hidden)[:num_rows]
        entered = self._enter(pieces)
        slots = self._decode.upload(np.array(entered, dtype=np.int64))
        outputs = torch.empty((2, aligned(num_rows, _ALIGNED_ROWS)), dtype=torch.int32, device=self._device)
        self._decode.draw(logits, slots.int(), outputs[0, :num_rows], outputs[1, :num_rows])
        rows, indices = range(num_rows), [piece.index for piece in pieces]
        draws = self._host_draws.draws(indices, run, self._step_before)  # while the forward runs
        self._host_draws.draw_again(run, indices, rows, draws, logits, entered, outputs[0], outputs[1])
        self._decode.state.set_last_tokens(slots, outputs[0, :num_rows])
        pending = self._fetch(outputs, num_rows)
        run.drawn.append(Drawn(indices, pending, *self._kept_logits(run, indices, rows, logits)))

    def _enter(self, pieces: Sequence[Piece]) -> list[int]:
        """Put the sequences of drawing chunks into slots, as they are after the chunk; their tokens follow."""
        slots, entries = [], []
        for piece in pieces:
            chunk, first = piece.chunk, piece.chunk.start
            slot = self._slots.find(chunk.sequence_id)
            if slot is None:
                slot, first = self._slots.take(chunk.sequence_id, chunk.sampling), 0
            length = chunk.start + chunk.length
            slots.append(slot)
            entries.append(SlotEntry(slot, length, chunk.cells[first:length], None, chunk.sampling, first))
        self._decode.state.enter(entries)
        return slots

    def _pool(self, pieces: Sequence[Piece], hidden: Tensor, run: StepRun) -> None:
        """`hidden` has the rows of all pieces that pool, in order."""
        at = 0
        for piece in pieces:
            if num_rows := len(piece.pooled_rows):
                run.pool(piece.index, self._decoder.normed(hidden[at : at + num_rows]).float().sum(dim=0))
                at += num_rows

    # Both.

    def _kept_logits(
        self, run: StepRun, indices: Sequence[int], rows: Sequence[int], logits: Tensor
    ) -> tuple[list[int], Tensor | None]:
        """The rows whose log probabilities are wanted, and their logits in float32, as the model gave them. Of `rows`,
        which are the draws of the step's chunks `indices`."""
        chunks = run.chunks
        wanted = [place for place, index in enumerate(indices) if chunks[index].sampling.logprobs is not None]
        if wanted:
            with self._failures.room_for(run, [indices[place] for place in wanted], "keeping logits"):
                scored = [rows[place] for place in wanted]
                where = self._decode.upload(np.array(scored, dtype=np.int64))
                return scored, logits.index_select(0, where).float()
        return [], None

    def _fetch(self, outputs: Tensor, num_rows: int) -> PendingTokens:
        host = torch.empty(outputs.shape, dtype=outputs.dtype, pin_memory=self._device.type == "cuda")
        host.copy_(outputs, non_blocking=True)
        ready = Moment(self._device)
        ready.record()
        tokens, bad = host[:, :num_rows].numpy()
        return PendingTokens(tokens, bad, ready)

    @property
    def _step_before(self) -> StepRun | None:
        """Of the step that is being launched."""
        return self._in_flight[-1] if self._in_flight else None


def _entry(slot: int, chunk: Chunk) -> SlotEntry:
    """A sequence whose lone token `chunk` is the first that it decodes in a slot."""
    assert chunk.tokens is not None, "a token that only the device knows was drawn for no slot"
    return SlotEntry(slot, chunk.start, chunk.cells[: chunk.start], int(chunk.tokens[0]), chunk.sampling)

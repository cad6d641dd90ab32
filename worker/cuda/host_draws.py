"""Draws that want more than the device does by itself: penalties, bias, masks, grammars. Their logits are changed, a
copy of those of the same forward, and then drawn from by the device's sampler again.

Owner and only caller: the executor. A grammar must know the token before, so its rows may wait for the step before,
while the device runs this step's forward; nothing else here waits, so that the device goes from the forward to these
draws by itself.

Where the grammar leaves no choice behind that token, the step before is told what has to follow it, and not this one,
which draws the first of it again: so the planner knows all of it a step earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from planner.errors import GrammarFailed
from planner.step import Chunk
from worker.cuda.changes import change_rows
from worker.cuda.decode import CudaDecode
from worker.cuda.decode_state import RowFault
from worker.cuda.failures import Failures
from worker.cuda.outcomes import StepRun
from worker.masks import BitMask, ConstrainedRow, MaskMaker, constrained_row
from worker.sampler import Draw


class _OpenRow(NamedTuple):
    """A row whose grammar may leave no choice in what follows `drawn`: the sequence's token of the step `run`, or
    nothing where that step is the row's own, which is still to draw."""

    row: ConstrainedRow
    run: StepRun
    drawn: tuple[int, ...]


class HostDraws:
    """`grammars` and `failures` are the executor's, which tells them who comes and goes."""

    def __init__(self, grammars: MaskMaker, decode: CudaDecode, failures: Failures) -> None:
        self._grammars = grammars
        self._decode = decode
        self._failures = failures
        self._upload = decode.upload
        self._open_rows: list[_OpenRow] = []  # of the step that is being launched

    def draws(self, indices: Sequence[int], run: StepRun, before: StepRun | None) -> list[Draw]:
        """How the step's chunks `indices` draw, to be asked while their forward runs. `before` is the step in flight
        before this one."""
        masks = self._masks(indices, run, before)
        return [_draw(run.chunks[index], masks.get(index)) for index in indices]

    def draw_again(
        self,
        run: StepRun,
        indices: Sequence[int],
        rows: Sequence[int],
        draws: Sequence[Draw],
        logits: Tensor,
        slots: Sequence[int],
        out_tokens: Tensor,
        bad_rows: Tensor,
    ) -> None:
        """Those of `draws` that the device did not do by itself, into `out_tokens` and into what slots remember.

        Row `rows[i]` of `logits`, `out_tokens` and `bad_rows` is the draw `draws[i]` of the step's chunk `indices[i]`;
        row r has the settings of `slots[r]`, whose length counts the row's own position already. `logits` stay as they
        are. To what their first draw said of them in `bad_rows` this adds where nothing is left to draw. Where the
        device has no room, these chunks fail.
        """
        places = [place for place, draw in enumerate(draws) if draw.changes_logits]
        if not places:
            return
        with self._failures.room_for(run, [indices[place] for place in places], "drawing a token"):
            again = [rows[place] for place in places]
            where, at = (self._upload(np.array(ids, np.int64)) for ids in (again, [slots[row] for row in again]))
            tokens, bad = self._drawn(logits.index_select(0, where).float(), [draws[place] for place in places], at)
            out_tokens.index_copy_(0, where, tokens)
            bad_rows.index_add_(0, where, bad, alpha=RowFault.NOTHING_LEFT.value)
            self._decode.state.set_last_tokens(at, tokens)

    def tell_forced(self) -> None:
        """Tell steps in flight, the one that is being launched included, what has to follow what they draw. To be
        called behind the launch of the draws, so that the device does not wait for it."""
        asked, self._open_rows = self._open_rows, []
        if not asked:
            return
        for (row, run, drawn), forced in zip(asked, self._grammars.forced([each.row for each in asked]), strict=True):
            if forced:
                run.force(row.sequence_id, drawn + forced)

    def _drawn(self, logits: Tensor, draws: Sequence[Draw], slots: Tensor) -> tuple[Tensor, Tensor]:
        """Change `logits` float32[N, vocab_size] as `draws` say, and draw a token from each row; int32[N]. Second: 1
        where there was none to draw, int32[N]."""
        change_rows(logits, draws, self._upload)
        tokens, bad = (torch.empty(len(draws), dtype=torch.int32, device=logits.device) for _ in range(2))
        self._decode.draw(logits, slots.int(), tokens, bad)
        return tokens, bad

    def _masks(self, indices: Sequence[int], run: StepRun, before: StepRun | None) -> dict[int, BitMask]:
        """What those of these chunks that follow a grammar may draw, by index. The last token of one may still be in
        the step before, which is then waited for; a sequence that cannot go on is given up."""
        places = [index for index in indices if run.chunks[index].sampling.grammar is not None]
        rows = self._rows(places, run, before)
        masks: dict[int, BitMask] = {}
        if not rows:
            return masks
        found = self._grammars.masks([open_row.row for open_row in rows.values()])
        for (index, open_row), mask in zip(rows.items(), found, strict=True):
            if isinstance(mask, GrammarFailed):
                run.give_up(index, mask)
                continue
            masks[index] = mask
            if run.chunks[index].sampling.may_be_forced:
                self._open_rows.append(open_row)
        return masks

    def _rows(self, places: Sequence[int], run: StepRun, before: StepRun | None) -> dict[int, _OpenRow]:
        """By index of those chunks, but for sequences whose token of the step before means nothing."""
        drawn: dict[int, int] = {}
        if any(run.chunks[index].tokens is None for index in places):
            assert before is not None, "a token that only the device knows is of no step in flight"
            drawn = before.drawn_tokens()
        rows = {}
        for index in places:
            chunk = run.chunks[index]
            if chunk.tokens is not None:
                rows[index] = _OpenRow(constrained_row(chunk), run, ())
            elif before is not None and (token := drawn.get(chunk.sequence_id)) is not None:
                rows[index] = _OpenRow(constrained_row(chunk, token), before, (token,))
        return rows


def _draw(chunk: Chunk, mask: BitMask | None) -> Draw:
    """`mask` has what is not to be drawn before `min_tokens` left out already."""
    masked = chunk.masked if mask is None else frozenset()
    return Draw(chunk.sampling, chunk.start + chunk.length, chunk.history, chunk.num_prompt, masked, mask)

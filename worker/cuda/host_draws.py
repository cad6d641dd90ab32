"""Draws that want more than the device does by itself: penalties, bias, masks, grammars. Their logits are changed, a
copy of those of the same forward, and then drawn from by the device's sampler again.

Owner and only caller: the executor. A grammar must know the token before, so its rows may wait for the step before;
nothing else here waits, so that the device goes from the forward to these draws by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planner.errors import GrammarFailed
from planner.step import Chunk
from worker.cuda.forbid import forbid_rows
from worker.cuda.outcomes import StepRun
from worker.masks import BitMask, MaskMaker, constrained_row
from worker.sampler import Draw, adjust

Upload = Callable[[npt.NDArray[Any]], Tensor]
"""Brings an array to the device without waiting for it."""
DrawRows = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""See `worker.cuda.decode.CudaDecode.draw`."""


class HostDraws:
    """`grammars` are the executor's, which tells them who comes and goes."""

    def __init__(self, grammars: MaskMaker, draw_rows: DrawRows, upload: Upload) -> None:
        self._grammars = grammars
        self._draw_rows = draw_rows
        self._upload = upload

    def draws(self, indices: Sequence[int], run: StepRun, before: StepRun | None) -> list[Draw]:
        """How the step's chunks `indices` draw, to be asked while their forward runs. `before` is the step in flight
        before this one."""
        masks = self._masks(indices, run, before)
        return [_draw(run.chunks[index], masks.get(index)) for index in indices]

    def redraw(
        self,
        logits: Tensor,
        places: Sequence[int],
        draws: Sequence[Draw],
        slots: Sequence[int],
        rows: Sequence[int],
        out_tokens: Tensor,
    ) -> Tensor:
        """Do the draws of `places`, rows of `logits`, of `draws` of all its rows; into rows `rows` of `out_tokens`.

        `slots`, one a place, have the settings, and lengths that count the row's own position already. Returns what was
        drawn, int32[len(places)]. Whether a forward's logits were finite was said by its first draw.
        """
        chosen = logits.index_select(0, self._upload(_ids(places))).float()
        changes = [draws[place] for place in places]
        for row, draw in enumerate(changes):
            if draw.changes_scores:
                adjust(chosen[row], draw, self._upload)
        masks = {row: draw.allowed for row, draw in enumerate(changes) if draw.allowed is not None}
        forbid_rows(chosen, masks, self._upload)
        tokens, bad = (torch.empty(len(places), dtype=torch.int32, device=logits.device) for _ in range(2))
        self._draw_rows(chosen, self._upload(np.array(slots, dtype=np.int32)), tokens, bad)
        out_tokens.index_copy_(0, self._upload(_ids(rows)), tokens)
        return tokens

    def _masks(self, indices: Sequence[int], run: StepRun, before: StepRun | None) -> dict[int, BitMask]:
        """What those of these chunks that follow a grammar may draw, by index. The last token of one may still be in
        the step before, which is then waited for; a sequence that cannot go on is given up."""
        places = [index for index in indices if run.chunks[index].sampling.grammar is not None]
        if not places:
            return {}
        drawn: dict[int, int] = {}
        if any(run.chunks[index].tokens is None for index in places):
            assert before is not None, "a token that only the device knows is of no step in flight"
            drawn = before.drawn_tokens()
        known = [i for i in places if run.chunks[i].tokens is not None or run.chunks[i].sequence_id in drawn]
        rows = [constrained_row(run.chunks[i], drawn.get(run.chunks[i].sequence_id)) for i in known]
        masks = {}
        for index, mask in zip(known, self._grammars.masks(rows), strict=True):
            if isinstance(mask, GrammarFailed):
                run.give_up(index, mask)
            else:
                masks[index] = mask
        return masks


def _draw(chunk: Chunk, mask: BitMask | None) -> Draw:
    """`mask` has what is not to be drawn before `min_tokens` left out already."""
    masked = chunk.masked if mask is None else frozenset()
    return Draw(chunk.sampling, chunk.start + chunk.length, chunk.history, chunk.num_prompt, masked, mask)


def _ids(rows: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(rows, dtype=np.int64)

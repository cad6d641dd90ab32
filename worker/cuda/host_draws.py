"""Draws that want more than the device does by itself: penalties, bias, masks, grammars. `worker.sampler` makes them,
from the logits of the same forward.

Owner and only caller: the executor. A grammar must know the token before, so its rows may wait for the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from planner.errors import GrammarFailed
from planner.step import Chunk
from worker.cuda.outcomes import StepRun
from worker.masks import BitMask, MaskMaker, constrained_row
from worker.sampler import Draw, sample


class HostDraws:
    """`grammars` are the executor's, which tells them who comes and goes. `upload` brings row numbers to the device
    without waiting for it."""

    def __init__(self, grammars: MaskMaker, upload: Callable[[Sequence[int]], Tensor]) -> None:
        self._grammars = grammars
        self._upload = upload

    def draws(self, indices: Sequence[int], run: StepRun, before: StepRun | None) -> list[Draw]:
        """How the step's chunks `indices` draw, to be asked while their forward runs. `before` is the step in flight
        before this one."""
        masks = self._masks(indices, run, before)
        return [_draw(run.chunks[index], masks.get(index)) for index in indices]

    def redraw(
        self, logits: Tensor, places: Sequence[int], draws: Sequence[Draw], rows: Sequence[int], out_tokens: Tensor
    ) -> Tensor:
        """Do the draws of `places`, rows of `logits`, of `draws` of all its rows; into rows `rows` of `out_tokens`.
        Returns what was drawn."""
        tokens = sample(logits.index_select(0, self._upload(places)), [draws[place] for place in places])
        out_tokens.index_copy_(0, self._upload(rows), tokens.int())
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

"""What draws change of their logits before the sampler reads them, on the GPU: penalties, biases, masks, grammars."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from worker.cuda.forbid import forbid_rows
from worker.sampler import Draw, Upload, adjust


def change_rows(logits: Tensor, draws: Sequence[Draw], upload: Upload) -> None:
    """What `draws`, one a row, change of `logits` float32[N, vocab_size], rows contiguous, in place; as
    `worker.sampler.adjusted` does in plain torch."""
    for row, draw in enumerate(draws):
        if draw.changes_scores:
            adjust(logits[row], draw, upload)
    forbid_rows(logits, {row: draw.allowed for row, draw in enumerate(draws) if draw.allowed is not None}, upload)

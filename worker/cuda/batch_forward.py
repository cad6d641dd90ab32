"""One packed forward on the GPU: chunks of prompts and what rides with them, as a replay where tokens are few.

Tokens that only the device knows are taken from their sequences' slots. Not for lone decodes: `worker.cuda.decode` is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from worker.attention import Span
from worker.batch import Batch
from worker.cuda.adapted_prefill import Adapted
from worker.cuda.decode import CudaDecode
from worker.cuda.prefill import PrefillChain
from worker.cuda.prefill_graphs import Prefill, PrefillGraphs
from worker.cuda.prefill_plan import plan_prefill
from worker.cuda.slots import Slots


class BatchForward:
    """Owner and only caller: the executor, whose `slots` say where `decode` keeps its sequences."""

    def __init__(
        self,
        prefill: PrefillChain,
        captured: PrefillGraphs | None,
        adapted: Adapted | None,
        decode: CudaDecode,
        slots: Slots,
        shared_heads: int,
    ) -> None:
        """`captured`: prefills of few tokens. `adapted` runs batches in which a row has an adapter. `shared_heads`
        query heads share a key/value head."""
        self._prefill, self._captured, self._adapted = prefill, captured, adapted
        self._decode, self._slots, self._shared_heads = decode, slots, shared_heads

    def hidden(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """[K, E]: what the last layer gives in `rows`, until the next forward."""
        spans = [Span(p.row, p.start, p.length, p.chunk.cells[: p.start + p.length]) for p in batch.pieces]
        prefill: Prefill = self._prefill
        captured = self._captured
        if self._adapted is not None and self._adapted.placed(batch.pieces):
            prefill, captured = self._adapted.prefill, self._adapted.captured
        upload = self._decode.upload
        if captured is not None and captured.takes(spans, len(rows)):
            self._feed(batch, captured.place(spans, batch.tokens, rows))
            return captured.hidden()
        tokens = upload(batch.tokens)
        self._feed(batch, tokens)
        plan = plan_prefill(spans, self._shared_heads, tokens.device, upload)
        return prefill.hidden(tokens, plan, upload(np.array(rows, dtype=np.int64)))

    def _feed(self, batch: Batch, tokens: Tensor) -> None:
        """Put the tokens into `tokens` int64[T], of the batch's rows, that only the device knows."""
        fed = [piece for piece in batch.pieces if piece.chunk.tokens is None]
        if fed:
            upload = self._decode.upload
            slots = upload(np.array([self._slots.of(piece.chunk.sequence_id) for piece in fed], dtype=np.int64))
            drawn = self._decode.state.last_token.index_select(0, slots)
            tokens.index_copy_(0, upload(np.array([piece.row for piece in fed], dtype=np.int64)), drawn.long())

"""How a decode step ends: the LM head, each row's token, and what its slot remembers of it. Capturable."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from worker.cuda.decode_buffers import ARG_MAX_BLOCK, DecodeBuffers, head_programs
from worker.cuda.decode_plan import DecodePlan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.decode_state import DecodeState
from worker.cuda.gemv import head_gemv_kernel
from worker.cuda.linear import head_kernel
from worker.cuda.norm import advance_kernel, arg_max_kernel, pick_kernel
from worker.cuda.packed import PackedMatrix, values_of
from worker.cuda.packed_products import head_gemv, head_product

Sampler = Callable[[torch.Tensor, torch.Tensor, DecodeState], None]
"""Draws from logits [rows, vocab] for the slots row_slots int32[rows] into state.out_tokens[:rows] (and marks
state.bad_rows[:rows]), on the current stream, without waiting for the device."""


class DecodeEnd:
    """`head` [vocab_size, hidden]. Reads the buffers' `normed` rows, in which the last layer left its result."""

    def __init__(self, shape: DecodeShape, head: torch.Tensor, state: DecodeState, buffers: DecodeBuffers) -> None:
        self._shape, self._head, self._state, self._buffers = shape, head, state, buffers

    def run(self, width: int, plan: DecodePlan, num_sums: int, sampler: Sampler | None) -> None:
        """`num_sums`: partial sums of squares that the last layer left. Without a sampler every row takes the arg max,
        lowest id on ties."""
        self._logits(width, plan, num_sums, store_logits=sampler is not None)
        self._finish(width, plan, sampler)

    def _logits(self, width: int, plan: DecodePlan, num_sums: int, *, store_logits: bool) -> None:
        """Logits, and each program's best token of each row (not those of a sampled step of the library chain)."""
        s, b, head = self._shape, self._buffers, self._head
        programs = head_programs(s, plan)
        if plan.gemv is not None and isinstance(head, PackedMatrix):
            tile = plan.gemv.head
            head_gemv(
                b.normed, b.sums, num_sums, s.norm_eps, head, b.logits, b.best, b.best_id, tile,
                plan.launch(tile.warps), store_logits=store_logits,
            )  # fmt: skip
        elif plan.gemv is not None:
            tile = plan.gemv.head
            head_gemv_kernel[(programs,)](
                b.normed, b.sums, head, b.logits, b.best, b.best_id, num_sums, s.norm_eps, N=s.vocab_size, K=s.hidden,
                COLUMNS=tile.columns, DEPTH=tile.depth, MAX_SUMS=b.max_sums, STORE_LOGITS=store_logits,
                **plan.launch(tile.warps),
            )  # fmt: skip
        elif plan.linear is not None and isinstance(head, PackedMatrix):
            wide = plan.linear.head
            launch = plan.launch(wide.warps, wide.stages)
            head_product(b.normed, head, b.logits, b.best, b.best_id, width, wide, launch, store_logits=store_logits)
        elif plan.linear is not None:
            wide = plan.linear.head
            head_kernel[(math.ceil(width / wide.rows), programs)](
                b.normed, head, b.logits, b.best, b.best_id, width, programs, N=s.vocab_size, K=s.hidden,
                ROWS=wide.rows, COLUMNS=wide.columns, DEPTH=wide.depth, SWAP=wide.swap, STORE_LOGITS=store_logits,
                **plan.launch(wide.warps, wide.stages),
            )  # fmt: skip
        else:
            torch.mm(b.normed[:width], values_of(head).t(), out=b.logits[:width])
            if not store_logits:
                arg_max_kernel[(programs, width)](
                    b.logits, b.best, b.best_id, programs, VOCAB=s.vocab_size, BLOCK=ARG_MAX_BLOCK, **plan.launch(4)
                )

    def _finish(self, width: int, plan: DecodePlan, sampler: Sampler | None) -> None:
        s, b, state = self._shape, self._buffers, self._state
        if sampler is None:
            pick_kernel[(width,)](
                b.best, b.best_id, head_programs(s, plan), state.row_slots, state.last_token, state.length,
                state.scratch_slot, state.out_tokens, state.bad_rows, VOCAB=s.vocab_size, BLOCK=1024,
                **plan.launch(4),
            )  # fmt: skip
            return
        sampler(b.logits[:width], state.row_slots[:width], state)
        advance_kernel[(width,)](
            state.row_slots, state.out_tokens, state.last_token, state.length, state.scratch_slot,
            PDL=False, num_warps=1,
        )  # fmt: skip

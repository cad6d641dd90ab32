"""The scratch tensors of a decode step, one set for all widths: only one step runs at a time."""

from __future__ import annotations

import torch

from worker.cuda.decode_plan import ITEM_WORDS, Chain, DecodePlan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.row_codes import RowCodes

ROW_TILE = 128
# Logits whose arg max one program takes where the library computed them.
ARG_MAX_BLOCK = 4096


class DecodeBuffers:
    """Sized for up to `max_rows` rows and the given plans; rows are padded to whole tiles, whose extra rows hold
    anything. `logits` [max_rows, vocab] in the model's dtype are the last sampled step's."""

    def __init__(self, shape: DecodeShape, max_rows: int, plans: list[DecodePlan], device: torch.device) -> None:
        def zeros(*sizes: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
            return torch.zeros(*sizes, dtype=dtype, device=device)

        def floats(*sizes: int) -> torch.Tensor:
            return zeros(*sizes, dtype=torch.float32)

        self.padded_rows = rows = -(-max_rows // ROW_TILE) * ROW_TILE
        self.max_sums = next_power_of_2(max([1, *(_num_sums(shape, plan) for plan in plans)]))
        row_splits = max(plan.attention.programs(plan.width) for plan in plans)
        programs = max(plan.width * head_programs(shape, plan) for plan in plans)
        self.residual = zeros(rows, shape.hidden)
        self.normed = zeros(rows, shape.hidden)
        self.sums = floats(self.max_sums)
        self.qkv = zeros(rows, shape.qkv_columns)
        self.partials = floats(max(_partial_columns(shape, plan) for plan in plans) * rows)
        self.attended = zeros(rows, shape.query_columns)
        self.projected = zeros(rows, shape.hidden)
        self.gate_up = zeros(rows, 2 * shape.ffn)
        self.active = zeros(rows, shape.ffn)
        coded = max(shape.hidden, shape.query_columns, shape.ffn) if shape.quantization == "fp8" else 0
        self.codes = RowCodes(rows, coded, device)
        self.logits = zeros(max_rows, shape.vocab_size)
        self.part_out = floats(row_splits * shape.query_columns)
        self.part_max = floats(row_splits * shape.num_heads)
        self.part_sum = floats(row_splits * shape.num_heads)
        self.arrived = zeros(max_rows * shape.num_kv_heads, dtype=torch.int32)
        self.work = zeros(row_splits, ITEM_WORDS, dtype=torch.int32)
        self.num_pieces = zeros(1, dtype=torch.int32)
        self.best = floats(programs)
        self.best_id = zeros(programs, dtype=torch.int32)

    def fits(self, shape: DecodeShape, width: int, plan: DecodePlan) -> None:
        """Asserts that a step writes inside these buffers: an overrun would corrupt a neighbour in silence."""
        assert width <= plan.width
        assert width <= len(self.logits)
        assert _num_sums(shape, plan) <= self.max_sums
        assert _partial_columns(shape, plan) * self.padded_rows <= self.partials.numel()
        assert plan.attention.programs(width) * shape.query_columns <= self.part_out.numel()
        assert width * head_programs(shape, plan) <= self.best.numel()


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def head_programs(shape: DecodeShape, plan: DecodePlan) -> int:
    """Programs that each leave their best token of a row."""
    if plan.gemv is not None:
        columns = plan.gemv.head.columns
    elif plan.linear is not None:
        columns = plan.linear.head.columns
    else:
        columns = ARG_MAX_BLOCK
    return -(-shape.vocab_size // columns)


def _num_sums(shape: DecodeShape, plan: DecodePlan) -> int:
    """Partial sums of squares of one row: one for each program that writes the residual."""
    if plan.gemv is None:
        return 1
    return shape.hidden // min(plan.gemv.o.columns, plan.gemv.down.columns)


def _partial_columns(shape: DecodeShape, plan: DecodePlan) -> int:
    """fp32 values a row of the largest partial result."""
    if plan.chain is Chain.LIBRARY:
        return 1 if plan.down_parts == 1 else plan.down_parts * shape.hidden
    if plan.linear is None:
        return shape.qkv_columns
    tiles = plan.linear
    whole = 2 * shape.ffn if plan.whole_gate_up else 0
    return max(whole, shape.qkv_columns * tiles.qkv.splits, shape.hidden * max(tiles.o.splits, tiles.down.splits))

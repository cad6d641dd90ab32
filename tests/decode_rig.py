"""A small worker without an engine: a pool with shuffled cells, sequences with random histories, and a decode chain,
beside the float32 reference that is fed the same tokens."""

from __future__ import annotations

import random

import numpy as np
import torch

from planner.request import SamplingParams
from tests.decode_reference import History, in_float32, random_weights, reference_step, rotary_tables
from worker.cell_rows import SCALED, packed_rows, unpacked_rows
from worker.config import Quantization
from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_chain import DecodeChain
from worker.cuda.decode_plan import DecodePlan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.decode_state import DecodeState, SlotEntry
from worker.cuda.fp8 import fp8_weights
from worker.cuda.packed import pack_weights
from worker.cuda.vendor_products import vendor_products
from worker.kv_pool import KvPool
from worker.models.weights import DecoderWeights

GREEDY = SamplingParams(temperature=0.0)


class Rig:
    """`lengths`: positions that each sequence starts with; sequence i lives in some slot of its own. `cell_dtype` is
    the model's unless given."""

    def __init__(
        self,
        shape: DecodeShape,
        lengths: list[int],
        width: int,
        plan: DecodePlan,
        device: torch.device,
        seed: int = 0,
        cell_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.width, self.plan, self.device = shape, width, plan, device
        self._random = random.Random(seed)
        generator = torch.Generator(device=device).manual_seed(seed)
        plain = random_weights(shape, device, seed)
        self.weights = quantized(plain, shape.quantization)
        self.exact = in_float32(self.weights)
        self.rotary = rotary_tables(shape, device)
        num_cells = sum(lengths) + 16 * len(lengths) + 8
        self.free_cells = self._random.sample(range(num_cells), num_cells)
        heads, self.cell_dtype = (shape.num_kv_heads, shape.head_dim), cell_dtype or shape.dtype
        cells = KvPool(shape.num_layers, num_cells, *heads, self.cell_dtype, device)
        # Cells that nobody owns hold NaN: a kernel that reads one is found out.
        for plane in (cells.keys, cells.values):
            plane.fill_(255 if self.cell_dtype == SCALED else float("nan"))
        self.pool = [cells.layer(index) for index in range(shape.num_layers)]
        num_slots = len(lengths) + 2
        self.slots = self._random.sample(range(num_slots), len(lengths))
        self.state = DecodeState(
            num_slots=num_slots, max_rows=width, context=shape.context, scratch_cell=num_cells, device=device
        )
        self.cells = [[self.free_cells.pop() for _ in range(length)] for length in lengths]
        self.tokens = [self._random.randrange(shape.vocab_size) for _ in lengths]
        self.histories = [self._history(cells, generator) for cells in self.cells]
        self.state.enter(
            [
                SlotEntry(slot, len(cells), np.array(cells, np.int32), token, GREEDY)
                for slot, cells, token in zip(self.slots, self.cells, self.tokens, strict=True)
            ]
        )
        self.buffers = DecodeBuffers(shape, width, [plan], device)
        vendor = vendor_products(device)
        self.chain = DecodeChain(shape, self.weights, self.rotary, self.pool, self.state, self.buffers, vendor)
        self.chain.prepare({width: plan})

    def _history(self, cells: list[int], generator: torch.Generator) -> History:
        history = History([], [])
        where = torch.tensor(cells, dtype=torch.int64, device=self.device)
        for k, v in self.pool:
            for pool, kept in ((k, history.keys), (v, history.values)):
                sizes = (len(cells), self.shape.num_kv_heads, self.shape.head_dim)
                content = torch.empty(sizes, dtype=self.shape.dtype, device=self.device).normal_(generator=generator)
                if self.cell_dtype == SCALED:
                    pool.view(torch.uint8)[where] = packed_rows(content)
                else:
                    pool[where] = content.to(pool.dtype)
                kept.append(self.stored(content.float()))
        return history

    def stored(self, heads: torch.Tensor) -> torch.Tensor:
        """float32[T, J, D] of what cells hold of `heads`."""
        if self.cell_dtype == SCALED:
            return unpacked_rows(packed_rows(heads), *heads.shape[1:])
        return heads.to(self.cell_dtype).float()

    def newest(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [J, D] of each layer in the last cell of sequence `index`."""
        cell = self.cells[index][-1]
        if self.cell_dtype != SCALED:
            return [(k[cell], v[cell]) for k, v in self.pool]
        sizes = self.shape.num_kv_heads, self.shape.head_dim
        rows = [[plane.view(torch.uint8)[cell : cell + 1] for plane in pair] for pair in self.pool]
        return [(unpacked_rows(k, *sizes)[0], unpacked_rows(v, *sizes)[0]) for k, v in rows]

    def place_rows(self) -> list[int]:
        """Gives every sequence a new cell and a row, in a new order each time; returns the sequence of each row."""
        order = self._random.sample(range(len(self.slots)), len(self.slots))
        for index in order:
            self.cells[index].append(self.free_cells.pop())
        self.state.set_rows([self.slots[i] for i in order], [self.cells[i][-1] for i in order])
        self.state.out_tokens.fill_(-7)
        return order

    def reference_logits(self) -> list[torch.Tensor]:
        """The reference's logits of every sequence for the tokens that the coming step feeds."""
        return [
            reference_step(self.shape, self.exact, self.rotary, token, history, self.stored)
            for token, history in zip(self.tokens, self.histories, strict=True)
        ]

    def follow(self, order: list[int]) -> list[int]:
        """The tokens that the step drew, by sequence; the reference is fed the same ones next."""
        drawn = self.state.out_tokens.tolist()
        for row, index in enumerate(order):
            self.tokens[index] = drawn[row]
        return list(self.tokens)


def quantized(weights: DecoderWeights, quantization: Quantization) -> DecoderWeights:
    """As a GPU's model has them, on any device and of any dtype."""
    if quantization == "none":
        return weights
    return fp8_weights(weights) if quantization == "fp8" else pack_weights(weights, quantization)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """|out - reference| / |reference|; NaN stays NaN and passes no comparison."""
    return float((out.float() - reference.float()).norm() / reference.float().norm())

"""A program's decode method on the GPU: the state of decoding sequences, and a captured step for every width.

Not for deciding who decodes: `worker.cuda.executor` says which rows run, and reads what came of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_chain import DecodeChain
from worker.cuda.decode_plan import DecodePlan, adapted, plan_decode
from worker.cuda.decode_shape import DecodeShape, decode_shape
from worker.cuda.decode_state import DecodeState
from worker.cuda.graphs import DecodeGraphs, Draw
from worker.cuda.lora import CudaLoraSlots
from worker.cuda.pinned_pages import PAGE_BYTES, PinnedPages
from worker.cuda.sampler import GpuSampler
from worker.cuda.slots import slots_needed
from worker.cuda.vendor_products import VendorProducts
from worker.kv_pool import KvPool
from worker.models.config import ModelConfig
from worker.models.weights import DecoderWeights
from worker.sampler import Upload

Step = Callable[[int, Draw], None]


class Steps(Protocol):
    """Decode steps that are ready to run; `worker.cuda.graphs.DecodeGraphs` has them captured."""

    def width_for(self, num_rows: int) -> int: ...

    def replay(self, width: int, draw: Draw) -> None: ...


Capture = Callable[[Step, Sequence[int], Sequence[Draw]], Steps]
Plan = Callable[[DecodeShape, int], DecodePlan]


class CudaDecode:
    """Owner of everything that captured steps read and write, but the weights and the pool; `upload` brings arrays to
    the device for whatever else the executor launches.

    Owner and only caller: the executor. All work is ordered on torch's current stream, and nothing waits for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        rotary: tuple[Tensor, Tensor],
        pool: KvPool,
        widths: Sequence[int],
        *,
        capture: Capture = DecodeGraphs,
        plan: Plan | None = None,
        adapters: CudaLoraSlots | None = None,
        vendor: VendorProducts | None = None,
    ) -> None:
        """`rotary`: cos and sin, float32 [context, head_dim / 2]. As many sequences decode as the widest width has
        rows. `capture` makes the steps ready, while nothing else runs on the device. `plan` says how a width runs, in
        place of `plan_decode`. With `adapters` there are steps with rows that have some. `vendor`: as `DecodeChain`
        takes it."""
        device, context, max_rows = pool.keys.device, len(rotary[0]), widths[-1]
        shape = decode_shape(config, context, weights.embedding.dtype, weights.quantization)
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
        plan = plan or partial(plan_decode, hopper=hopper)
        self._plans = {width: plan(shape, width) for width in widths}
        self._adapted_plans = {} if adapters is None else {w: adapted(each, shape) for w, each in self._plans.items()}
        # A page holds the masks of all rows, else they would wait for the device.
        page_bytes = max(PAGE_BYTES, max_rows * config.vocab_size // 4)
        self.upload: Upload = PinnedPages(device, page_bytes).upload
        self.state = DecodeState(
            num_slots=slots_needed(max_rows),
            max_rows=max_rows,
            context=context,
            scratch_cell=pool.scratch_cell,
            device=device,
            upload=self.upload,
        )
        self._adapters = adapters
        plans = [*self._plans.values(), *self._adapted_plans.values()]
        self._buffers = DecodeBuffers(shape, max_rows, plans, device)
        self._sampler = GpuSampler(max_rows, config.vocab_size, device)
        self._planes = _planes(pool)
        self._chain = DecodeChain(shape, weights, rotary, self._planes, self.state, self._buffers, vendor)
        self._chain.prepare(self._plans)
        draws = [draw for draw in Draw if adapters is not None or not draw.is_adapted]
        self._make_steps = partial(capture, self._run, widths, draws)
        self._steps: Steps | None = self._make_steps()

    def step(self, slots: Sequence[int], cells: Sequence[int], draw: Draw, adapters: Sequence[int] = ()) -> None:
        """One token more for each of `slots`, whose new cells are `cells`. Row r of the state's outputs and of
        `logits` is that of slots[r], until the next step. `adapters`: as `set_rows` takes them, of an adapted step."""
        self.state.set_rows(slots, cells, adapters)
        steps = self._steps
        assert steps is not None, "capturing steps again has failed"
        steps.replay(steps.width_for(len(slots)), draw)

    def rebind(self, pool: KvPool) -> None:
        """The pool has moved: capture all steps again over its new tensors. Sequences keep their slots and tokens."""
        self._steps = None  # the old graphs' memory serves the new ones
        self._planes[:] = _planes(pool)
        self.state.move_scratch(pool.scratch_cell)
        self._steps = self._make_steps()

    def logits(self, num_rows: int) -> Tensor:
        """[num_rows, vocab_size] in the model's dtype, of the last step, which was a sampled one."""
        return self._buffers.logits[:num_rows]

    def draw(self, logits: Tensor, slots: Tensor, tokens: Tensor, bad: Tensor) -> None:
        """Draw from float32[K, vocab_size] of another forward into `tokens` and `bad`, int32[K]; row r has the
        settings of slot `slots[r]`, int32[K], whose length already counts the row's own position."""
        state = self.state
        before = state.length - 1
        self._sampler.sample(
            logits, slots, state.temperature, state.top_k, state.top_p, state.min_p, state.seed, before, tokens, bad
        )

    def _run(self, width: int, draw: Draw) -> None:
        draws = self._draw_rows if draw.is_sampled else None
        if draw.is_adapted:
            assert self._adapters is not None
            plan = self._adapted_plans[width]
            beside = self._adapters.beside(self.state.row_adapters[:width], dependent_launch=plan.dependent_launch)
            self._chain.run(width, plan, draws, beside)
        else:
            self._chain.run(width, self._plans[width], draws)

    def _draw_rows(self, logits: Tensor, row_slots: Tensor, state: DecodeState) -> None:
        num_rows = len(row_slots)
        self._sampler.sample(
            logits, row_slots, state.temperature, state.top_k, state.top_p, state.min_p, state.seed, state.length,
            state.out_tokens[:num_rows], state.bad_rows[:num_rows],
        )  # fmt: skip


def _planes(pool: KvPool) -> list[tuple[Tensor, Tensor]]:
    """K and V of each layer."""
    return [pool.layer(index) for index in range(len(pool.keys))]

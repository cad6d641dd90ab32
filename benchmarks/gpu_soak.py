"""Random load on a GPU's executor under the real planner, in a pool that is too small for it.

`python -m benchmarks.gpu_soak [--seconds 60] [--seed 0] [--keep]` on a machine with a GPU. A small float32 model gets
prompts of mixed lengths that often begin alike, with forks, cancels, penalties, log probabilities and draws; cells run
out all the time, so sequences are swapped, recomputed and evicted. At the end cells are conserved, neither device nor
host memory has grown, nothing was captured again, and answers equal those of an undisturbed run on the GPU and, some of
them, those of the CPU's executor. Any breach is an AssertionError. Kernels that were compiled under way are told.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from benchmarks.record import record
from planner.request import FinishReason, Request, SamplingParams, Update
from tests.turns import Turns, limits_of
from worker.attention_op import attention_of
from worker.cuda.decode import CudaDecode
from worker.cuda.executor import CudaExecutor
from worker.cuda.graphs import DecodeGraphs, Draw
from worker.cuda.memory import captured_prefills
from worker.cuda.prefill import PrefillChain
from worker.cuda.swap import PinnedSwap
from worker.cuda.warm_up import warm_up
from worker.executor import Executor, ProgramInfo
from worker.forwards import EagerForwards
from worker.kernels import CellCopier
from worker.kv_pool import KvPool, bytes_per_cell
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.dummy_weights import dummy_weights
from worker.models.rope import Rope
from worker.models.rope_tables import rope_tables
from worker.models.weights import DecoderWeights
from worker.torch_executor import TorchExecutor

CONTEXT, NUM_CELLS, MAX_SEQS, W = 1024, 3000, 32, 512
MODEL = ModelConfig(
    architecture="llama", vocab_size=2003, hidden_size=128, intermediate_size=256, num_layers=4, num_heads=8,
    num_kv_heads=4, head_dim=32, norm_eps=1e-5, rope=Rope(10000.0), context=CONTEXT, windows=(None, 200, None, None),
)  # fmt: skip
NUM_COMPARED = 40
# On N(0, 0.02) a matrix of this size hardly changes what it is given.
WIDTH = 6.0
SETTLED_SHARE = 0.3
MAX_DEVICE_GROWTH = 8 << 20
MAX_HOST_GROWTH = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="also write a dated file to benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the model is small: waiting for a second one costs more than it brings
    began = time.monotonic()
    gpu, cpu = decoder(torch.device("cuda")), decoder(torch.device("cpu"))
    captures = Captures()
    executor = cuda_executor(gpu, NUM_CELLS, captures, swap_blocks=64)
    soak = Soak(executor, captures, random.Random(options.seed))
    print(f"ready, {time.monotonic() - began:.0f} s", flush=True)
    late: list[str] = []
    triton.knobs.compilation.listener = lambda **told: late.append(told["src"].name)
    soak.run(options.seconds)
    triton.knobs.compilation.listener = None
    print(f"{soak.num_ended} sequences ended, {time.monotonic() - began:.0f} s", flush=True)
    figures = soak.figures()
    figures |= {"compared": compare(soak, gpu, cpu), "kernels_compiled_under_way": late}
    config = {
        "device": torch.cuda.get_device_name(), "seconds": options.seconds, "seed": options.seed, "cells": NUM_CELLS,
        "max_num_seqs": MAX_SEQS, "context": CONTEXT, "dtype": "float32", "swap_blocks": 64, "swap_block_cells": 32,
    }  # fmt: skip
    record("gpu-soak", config, figures, keep=options.keep)


def decoder(device: torch.device) -> Decoder:
    """The same weights wherever they are. Wide ones, so that answers vary and nearly equal logits are rare."""
    weights = dummy_weights(MODEL, torch.float32, torch.device("cpu"), 0)

    def moved(tensor: Tensor | None, scale: float) -> Any:
        return None if tensor is None else (tensor * scale).to(device)

    layers = tuple(
        replace(layer, **{each.name: moved(getattr(layer, each.name), _scale(each.name)) for each in fields(layer)})
        for layer in weights.layers
    )
    return Decoder(
        MODEL,
        DecoderWeights(
            (weights.embedding * WIDTH).to(device),
            layers,
            weights.final_norm.to(device),
            (weights.head * WIDTH).to(device),
        ),
        CONTEXT,
    )


def _scale(name: str) -> float:
    return WIDTH if name in ("qkv", "output", "gate_up", "down") else 1.0


def info(num_cells: int, device: str, **changes: Any) -> ProgramInfo:
    widths = tuple(1 << exponent for exponent in range(MAX_SEQS.bit_length()))
    return replace(
        ProgramInfo(
            name="soak", architecture=MODEL.architecture, vocab_size=MODEL.vocab_size, context=CONTEXT,
            max_prefill_tokens=W, min_prefill_tokens=2, widths=widths, num_cells=num_cells,
            num_layers=MODEL.num_layers, num_kv_heads=MODEL.num_kv_heads, head_dim=MODEL.head_dim, dtype="float32",
            device=device,
            bytes_per_cell=bytes_per_cell(MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_dim, torch.float32),
        ),
        **changes,
    )  # fmt: skip


class Captures:
    """Captures steps, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Callable[[int, Draw], None], widths: Sequence[int], draws: Sequence[Draw]) -> DecodeGraphs:
        self.count += 1
        return DecodeGraphs(step, widths, draws)


def cuda_executor(model: Decoder, num_cells: int, captures: Captures, swap_blocks: int) -> CudaExecutor:
    cos, sin = rope_tables(MODEL.rope, MODEL.head_dim, CONTEXT)
    program = info(num_cells, "cuda", swap_blocks=swap_blocks, swap_block_cells=32)
    device, rotary, weights = model.device, (cos.cuda(), sin.cuda()), model.weights
    pool = KvPool(MODEL.num_layers, num_cells, MODEL.num_kv_heads, MODEL.head_dim, torch.float32, device)
    decode = CudaDecode(MODEL, weights, rotary, pool, program.widths, capture=captures)
    copier = CellCopier([*pool.keys, *pool.values])
    swap = PinnedSwap(copier, swap_blocks, program.swap_block_cells) if swap_blocks else None
    prefill = PrefillChain(MODEL, weights, rotary, pool)
    captured = captured_prefills(program, model, prefill, pool)
    executor = CudaExecutor(program, model, prefill, decode, swap, captured=captured)
    warm_up(executor, num_cells)
    return executor


def cpu_executor(model: Decoder) -> TorchExecutor:
    num_cells = 4 * CONTEXT
    program = info(num_cells, "cpu")
    pool = KvPool(MODEL.num_layers, num_cells, MODEL.num_kv_heads, MODEL.head_dim, torch.float32, model.device)
    return TorchExecutor(program, EagerForwards(model, pool, attention_of))


def turns_of(executor: Executor) -> Turns[Executor]:
    """With as many steps in flight as it takes."""
    limits = limits_of(
        executor.info, max_num_seqs=MAX_SEQS, max_batched_tokens=W, prefill_chunk_tokens=128,
        max_steps_in_flight=executor.max_steps_in_flight, min_swapped_cells=32,
    )  # fmt: skip
    return Turns(limits, executor, checked=False)


@dataclass
class Asked:
    request: Request
    answers: list[list[int]]
    reasons: dict[int, FinishReason] = field(default_factory=dict)


class Soak:
    """Keeps an executor busy, and looks at it."""

    def __init__(self, executor: CudaExecutor, captures: Captures, lot: random.Random) -> None:
        self._turns = turns_of(executor)
        self._captures = captures
        self._lot = lot
        self._openings = [[lot.randrange(MODEL.vocab_size) for _ in range(300)] for _ in range(4)]
        self.live: dict[int, Asked] = {}
        self.done: list[Asked] = []
        self.num_turns = self.num_ended = 0
        self._device_bytes: list[int] = []
        self._host_bytes: list[int] = []

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._ask()
            self._hear(self._turns.turn())
            self.num_turns += 1
            if self.num_turns % 200 == 0:
                self._look()
        while self._turns.planner.has_work:
            self._hear(self._turns.turn())
        self._look()
        state = self._turns.planner.snapshot()
        assert state.owned_cells == 0, f"{state.owned_cells} cells are owned by nobody"
        assert not self.live, "requests without an end"
        settled = int(len(self._device_bytes) * SETTLED_SHARE)
        for sizes, most in ((self._device_bytes, MAX_DEVICE_GROWTH), (self._host_bytes, MAX_HOST_GROWTH)):
            assert max(sizes[settled:]) - sizes[settled] < most, f"memory grows: {sizes}"
        assert self._captures.count == 1, "steps were captured again"

    def figures(self) -> dict[str, Any]:
        metrics = self._turns.planner.metrics
        assert metrics.num_swapped_in > 10, "too little was swapped for this to say anything"
        assert metrics.num_prefix_hits > 1000, "too little was found again for this to say anything"
        return {
            "turns": self.num_turns, "sequences_ended": self.num_ended,
            "finished": {reason.value: count for reason, count in metrics.finished.items()},
            "tokens": metrics.num_tokens.total(), "preemptions": metrics.num_preemptions,
            "swapped_out": metrics.num_swapped_out, "swapped_in": metrics.num_swapped_in,
            "cells_swapped_out": metrics.num_cells_swapped_out, "prefix_hits": metrics.num_prefix_hits,
            "device_bytes": [self._device_bytes[0], self._device_bytes[-1]],
            "host_bytes": [self._host_bytes[0], self._host_bytes[-1]],
        }  # fmt: skip

    def _ask(self) -> None:
        lot, planner = self._lot, self._turns.planner
        if len(self.live) < 48 and lot.random() < 0.4:
            request = self._request()
            self.live[planner.submit(request)] = Asked(request, [[] for _ in range(request.n)])
        if self.live and lot.random() < 0.03:
            request_id = lot.choice(list(self.live))
            self._hear(planner.cancel(request_id, lot.choice([None, {0}])))

    def _request(self) -> Request:
        lot = self._lot
        sampling = lot.choice(
            [
                SamplingParams(temperature=0.0),
                SamplingParams(temperature=0.0),
                SamplingParams(temperature=0.8, seed=lot.getrandbits(64), top_p=0.9),
                SamplingParams(seed=lot.getrandbits(64), top_k=20),
                SamplingParams(temperature=0.0, logprobs=2),
                SamplingParams(seed=lot.getrandbits(64), presence_penalty=1.0),
            ]
        )
        shared = lot.choice(self._openings)[: lot.choice((0, 0, 100, 300))]
        own = [lot.randrange(MODEL.vocab_size) for _ in range(lot.choice((1, 3, 20, 80, 250)))]
        num_tokens = lot.choice((1, 10, 60, 200))
        return Request(np.array([*shared, *own]), num_tokens, sampling, n=lot.choice((1, 1, 1, 1, 3)))

    def _hear(self, updates: list[Update]) -> None:
        for update in updates:
            asked = self.live[update.request_id]
            assert update.error is None, update.error
            assert update.index not in asked.reasons, "news after the end"
            asked.answers[update.index] += update.tokens
            if update.finish_reason is not None:
                asked.reasons[update.index] = update.finish_reason
                self.num_ended += 1
                if len(asked.reasons) == asked.request.n:
                    self.done.append(self.live.pop(update.request_id))

    def _look(self) -> None:
        self._turns.planner.check()
        state = self._turns.planner.snapshot()
        assert state.free_cells + state.owned_cells + state.cached_cells == state.capacity, state
        self._device_bytes.append(torch.cuda.memory_allocated())
        self._host_bytes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def compare(soak: Soak, gpu: Decoder, cpu: Decoder) -> dict[str, int]:
    """Answers of the load against undisturbed ones, the shorter ones also against the CPU's; how many sequences."""
    roomy = turns_of(cuda_executor(gpu, 4 * CONTEXT, Captures(), swap_blocks=0))
    plain = turns_of(cpu_executor(cpu))
    lot = random.Random(1)
    whole = [asked for asked in soak.done if FinishReason.CANCELLED not in asked.reasons.values()]
    chosen = lot.sample(whole, min(NUM_COMPARED, len(whole)))
    for asked in chosen:
        assert roomy.answer([asked.request]) == [asked.answers], "an answer differs from an undisturbed one"
    print(f"{len(chosen)} requests answered alone as they were", flush=True)
    few = sorted(chosen, key=lambda asked: sum(map(len, asked.answers)))[: NUM_COMPARED // 2]
    for asked in few:
        assert plain.answer([asked.request]) == [asked.answers], "an answer differs from the CPU's"
    return {"alone": sum(asked.request.n for asked in chosen), "on the CPU": sum(asked.request.n for asked in few)}


if __name__ == "__main__":
    main()

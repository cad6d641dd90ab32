"""Drives the torch executor with the real planner, and without it by single steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from planner.request import Request, SamplingParams
from planner.slices import Method, Slice
from planner.step import Chunk, ChunkOutput, Step
from tests.turns import E, Turns, limits_of
from worker.cell_image import CellLayout
from worker.config import EngineConfig
from worker.cpu.forwards import forwards_of
from worker.kv_pool import KvPool
from worker.lora import LoraSlots
from worker.pool_port import PoolPort, TorchMover
from worker.program import Program, adapted_forwards, load_program
from worker.swap import HostSwap
from worker.torch_executor import TorchExecutor

GREEDY = SamplingParams(temperature=0.0)


def load(model: str, *, keep_blocks: bool = True, **settings: Any) -> Program:
    """One thread: where cores are shared, waiting for a second one costs more than it brings."""
    from torch import set_num_threads

    set_num_threads(1)
    config = EngineConfig(model=model, device="cpu", dtype="float32", num_threads=1, **settings)
    return load_program(config, keep_blocks=keep_blocks)


def executor_of(
    program: Program,
    capacity: int,
    min_prefill_tokens: int = 2,
    *,
    swap_blocks: int = 0,
    swap_block_cells: int = 4,
    adapters: LoraSlots | None = None,
) -> TorchExecutor:
    """An executor with a pool, and host blocks, of its own over a program that others share."""
    info = replace(
        program.info,
        num_cells=capacity,
        min_prefill_tokens=min_prefill_tokens,
        swap_blocks=swap_blocks,
        swap_block_cells=swap_block_cells,
    )
    decoder = program.decoder
    pool = KvPool(info.num_layers, capacity, info.num_kv_heads, info.head_dim, decoder.dtype, decoder.device)
    swap = HostSwap(pool, swap_blocks, swap_block_cells) if swap_blocks else None
    port = PoolPort(TorchMover(pool), CellLayout.of(info))
    forwards = forwards_of(decoder, pool) if adapters is None else adapted_forwards(decoder, pool, adapters)
    return TorchExecutor(info, forwards, swap, port=port, adapters=adapters)


class Rig(Turns[E]):
    """Narrow decodes, and steps that have room for whole prompts, unless other limits are given."""

    def __init__(self, executor: E, prefill_chunk_tokens: int = 512, max_num_seqs: int = 32, **changes: Any) -> None:
        """`changes` are further limits."""
        widths = tuple(width for width in executor.info.widths if width <= max_num_seqs)
        fields = {"max_num_seqs": max_num_seqs, "prefill_chunk_tokens": prefill_chunk_tokens, "widths": widths}
        super().__init__(limits_of(executor.info, **(fields | changes)), executor)


def request(prompt: Sequence[int], max_tokens: int, sampling: SamplingParams = GREEDY, **options: Any) -> Request:
    return Request(np.array(prompt, dtype=np.int64), max_tokens, sampling, **options)


def chunk(
    tokens: Sequence[int],
    cells: Sequence[int],
    start: int = 0,
    sampling: SamplingParams = GREEDY,
    sequence_id: int = 1,
    **options: Any,
) -> Chunk:
    """A chunk that samples unless told otherwise; `cells` are those of the whole sequence so far."""
    return Chunk(
        sequence_id=sequence_id,
        start=start,
        length=len(tokens),
        cells=np.array(cells, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int64),
        samples=options.pop("samples", True),
        sampling=sampling,
        **options,
    )


def run_step(executor: TorchExecutor, chunks: Sequence[Chunk], slices: Sequence[Slice] = ()) -> list[Any]:
    """Outcomes of one step; without `slices` it is one prefill."""
    total = sum(c.length for c in chunks)
    executor.launch(Step(1, tuple(chunks), tuple(slices) or (Slice(0, total, Method.PREFILL),)))
    return list(executor.collect().outcomes)


def token_of(outcome: Any) -> int:
    assert isinstance(outcome, ChunkOutput), outcome
    assert outcome.token is not None
    return outcome.token

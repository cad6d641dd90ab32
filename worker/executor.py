"""The executor's seam: tokens and positions in, sampled tokens out.

Everything above this line (planner, engine, serving) is free of torch; everything below it (models, pool, kernels)
knows nothing of requests. Tests put a scripted fake here and patch nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from planner.limits import SWAP_BLOCK_CELLS, Limits
from planner.request import Request
from planner.step import Step, StepResult
from worker.adapters import AdapterSlots
from worker.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """What the rest of the system needs to know of a program; all integers and names, no tensors.

    W = `max_prefill_tokens`, m = `min_prefill_tokens`, 2 <= m <= W. `widths` ascend from 1. `num_cells` excludes the
    scratch cell. Cache geometry: per layer K and V of `[num_cells, num_kv_heads, head_dim]`.
    `cell_dtype`: of keys and values, where it is not the model's `dtype`; "fp8" is e4m3 with a scale a head.
    `swap_blocks` of `swap_block_cells` cells each: host memory that steps may swap to; none where it cannot swap.
    `vector_size`: numbers of a prompt's vector; None where the program gives none.
    `weight_bytes`: what a decode forward reads of its weights, each once; it sets the floor of a decode step.
    `num_block_matrices`: of the weights, those that stay in the blocks of codes that their file has.
    """

    name: str
    architecture: str
    vocab_size: int
    context: int
    max_prefill_tokens: int
    min_prefill_tokens: int
    widths: tuple[int, ...]
    num_cells: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    device: str
    bytes_per_cell: int
    weight_bytes: int = 0
    cell_dtype: str | None = None
    num_block_matrices: int = 0
    swap_blocks: int = 0
    swap_block_cells: int = SWAP_BLOCK_CELLS
    vector_size: int | None = None


class Executor(Protocol):
    """Runs steps. Owner and only caller: the engine thread.

    `launch` starts a step and returns at once where the device allows; `collect` waits for the oldest launched step.
    At most `max_steps_in_flight` steps are launched and not collected. A forward that fails is reported in the
    result, for the chunks it held; an exception from either call means that the executor is dead. After a failed
    forward no cell content of the chunks it held may be relied on.
    """

    @property
    def info(self) -> ProgramInfo: ...

    @property
    def max_steps_in_flight(self) -> int: ...

    @property
    def adapters(self) -> AdapterSlots | None:
        """Where it keeps the matrices of adapters; None where chunks cannot have any."""
        ...

    @property
    def num_beats(self) -> int:
        """Grows while a step gets on; read on any thread. Constant where no step takes longer than a second or so."""
        ...

    def prepare(self, request: Request) -> None:
        """The planner took this request. What is slow to make for it may begin, on another thread; never blocks."""

    def launch(self, step: Step) -> None: ...

    def collect(self) -> StepResult: ...

    def close(self) -> None: ...


def limits_for(config: EngineConfig, info: ProgramInfo, max_steps_in_flight: int = 1) -> Limits:
    """What a planner keeps to when it feeds this program. Raises `InvalidConfiguration` where settings contradict."""
    return Limits(
        capacity=info.num_cells,
        context=info.context,
        vocab_size=info.vocab_size,
        max_prefill_tokens=info.max_prefill_tokens,
        min_prefill_tokens=info.min_prefill_tokens,
        widths=info.widths,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.batched_tokens(info.max_prefill_tokens),
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        max_steps_in_flight=max_steps_in_flight,
        prefix_caching=config.prefix_caching,
        swap_blocks=info.swap_blocks,
        swap_block_cells=info.swap_block_cells,
        pools=info.vector_size is not None,
        tenant_weights=config.tenant_weights,
    )

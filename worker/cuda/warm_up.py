"""Steps that run once before an executor on a GPU serves anybody: what is slow the first time, and what is largest.

Not for what a start measures around them: `worker.cuda.memory` does.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import torch

from planner.request import Adapter, SamplingParams
from planner.slices import Method, Slice
from planner.step import Chunk, Step, StepResult
from worker.cuda.prefill_graphs import PREFILL_WIDTHS
from worker.executor import ProgramInfo


class WarmedUp(Protocol):
    """Of a `worker.cuda.executor.CudaExecutor`, what warming it up takes."""

    @property
    def info(self) -> ProgramInfo: ...

    @property
    def has_lost_any(self) -> bool: ...

    def launch(self, step: Step) -> None: ...

    def collect(self) -> StepResult: ...


def warm_up(executor: WarmedUp, num_cells: int, adapter: Adapter | None = None) -> None:
    """Run what is slow or large the first time: the widest prefill that `num_cells` hold with as many draws as there
    may be, one long chunk beside a lone token, a decode, and prefills with each number of rows; all of it with
    `adapter`. Leaves nothing behind but what cells hold. Raises torch's `OutOfMemoryError` where a step has no room:
    what fails requests later is a wrong setting now."""
    info = executor.info
    room = min(info.max_prefill_tokens, num_cells)
    draws = min(info.widths[-1], room)
    most = max(1, info.context - 1)  # that a token is drawn behind; where a context is one token, none ever is
    each = min(room // draws, most)
    longest = max(1, min(room, info.context) - 1)
    batches = [[each] * draws, [longest, 1] if longest < room else [1], [1]]
    # The library has kernels of its own for each number of rows, and loads them when they are first used.
    few = min(room, 2 * PREFILL_WIDTHS[-1])
    for exponent in range(min(draws, few).bit_length()):
        number = 1 << exponent
        batches.append([min(few // number, most)] * number)
    held: tuple[int, ...] = ()
    for number, lengths in enumerate(batches):
        method = Method.PREFILL if sum(lengths) > 1 else Method.DECODE
        chunks = trial_chunks(lengths, adapter, samples=info.context > 1)
        executor.launch(Step(number, chunks, (Slice(0, sum(lengths), method),), held))
        executor.collect()
        if executor.has_lost_any:
            raise torch.OutOfMemoryError(
                f"a step of {sum(lengths)} tokens in {len(lengths)} chunks has no room; lower max_prefill_tokens or "
                "max_num_seqs"
            )
        held = tuple(chunk.sequence_id for chunk in chunks)
    executor.launch(Step(len(batches), (), (), held))
    executor.collect()


def trial_chunks(lengths: list[int], adapter: Adapter | None = None, *, samples: bool = True) -> tuple[Chunk, ...]:
    """Chunks of these lengths, in the first cells of the pool, that draw if they are to."""
    ends = list(itertools.accumulate(lengths))
    return tuple(
        Chunk(
            sequence_id=-end,  # ids of real sequences are positive
            start=0,
            length=length,
            cells=np.arange(end - length, end, dtype=np.int32),
            tokens=np.zeros(length, dtype=np.int64),
            samples=samples,
            sampling=SamplingParams(),
            adapter=adapter,
        )
        for length, end in zip(lengths, ends, strict=True)
    )

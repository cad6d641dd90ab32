"""Makes a program's executor on a GPU: decodes of a whole ladder of widths, captured, and a pool of what is left.

As for other models, what graphs and forwards take is measured and not computed: a trial with a small pool captures all
widths and runs the widest prefill, and then the device says what is free.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from planner.errors import InvalidConfiguration
from planner.request import SamplingParams
from planner.slices import Method, Slice
from worker import packed_op as packed_op  # programs of packed matrices call its operator
from worker.attention_op import distinct_windows
from worker.batch import cut
from worker.cell_image import CellLayout
from worker.config import EngineConfig
from worker.cuda.forbid import compile_forbid
from worker.cuda.graphs import Capture, capture_stream, captures
from worker.cuda.memory import cells_that_fit, pinned_swap, trial_blocks
from worker.cuda.mover import CudaMover
from worker.cuda.prefill_graphs import PREFILL_WIDTHS
from worker.cuda.row_draws import RowDraws
from worker.cuda.swap import PinnedSwap
from worker.cuda.warm_up import trial_chunks
from worker.executor import ProgramInfo
from worker.forwards import Forwards
from worker.kv_pool import KvPool
from worker.masks import MaskMaker
from worker.pool_port import PoolPort
from worker.program import make_pool
from worker.programs.captured import CapturedMethods
from worker.programs.forwards import Methods, ProgramForwards, decode_ladder
from worker.programs.metadata import ProgramMetadata
from worker.sampler import Draw, DrawRows
from worker.torch_executor import TorchExecutor

logger = logging.getLogger(__name__)

# Of a warm-up's prefill: chunks that attention's kernels take in tiles of every kind.
_SMALL_CHUNKS = (1, 3, 40)


@dataclass(frozen=True, slots=True)
class _Running:
    """A pool, what runs over it, what draws from the logits, and where preempted sequences go, whose staging takes
    memory of the device, too."""

    pool: KvPool
    forwards: Forwards
    draw_rows: DrawRows
    swap: PinnedSwap | None


def build_on_gpu(
    config: EngineConfig, metadata: ProgramMetadata, info: ProgramInfo, methods: Methods, masks: MaskMaker
) -> TorchExecutor:
    """Size the pool, unless `config` or the program say how large it is, capture all decodes unless told not to, and
    run everything once.

    Raises `InvalidConfiguration` where the memory does not hold one context's cells, or not as many as were asked for.
    """
    began = time.perf_counter()
    decodes = decode_ladder(metadata, methods, config.decode_widths)
    info = replace(info, widths=tuple(decodes))
    stream = capture_stream() if config.cuda_graph else None

    def make(num_cells: int, swap_blocks: int) -> _Running:
        started = time.perf_counter()
        pool = make_pool(config, replace(info, num_cells=num_cells))
        captured = None
        if stream is not None:
            captured = capture_methods(metadata, Methods(decodes, methods.prefill), pool, capture=captures(stream))
        warming = time.perf_counter()
        forwards = ProgramForwards(metadata, pool, decodes, methods.prefill, captured)
        draw_rows = RowDraws(info.widths[-1], info.vocab_size, pool.keys.device)
        warm_up(forwards, draw_rows, info, num_cells)
        compile_forbid(info.vocab_size, pool.keys.device)
        logger.info("captured in %.1f s, tried all in %.1f s", warming - started, time.perf_counter() - warming)
        return _Running(pool, forwards, draw_rows, pinned_swap(replace(info, swap_blocks=swap_blocks), pool))

    def trial(num_cells: int) -> _Running:
        return make(num_cells, trial_blocks(info))

    told = config.max_cells or metadata.cells
    try:
        num_cells = told or cells_that_fit(trial, info, torch.device(info.device), config)
        sized = time.perf_counter()
        running = make(num_cells, info.swap_blocks)
    except torch.OutOfMemoryError as error:
        raise InvalidConfiguration(
            f"the GPU's memory does not hold the pool and the work beside the weights, of which a prefill of "
            f"{info.max_prefill_tokens} tokens with the logits of all is the largest: {error}",
            param="gpu_memory_utilization" if told is None else "max_cells",
        ) from error
    logger.info("sized in %.1f s, made in %.1f s", sized - began, time.perf_counter() - sized)
    info, pool = replace(info, num_cells=num_cells), running.pool
    port = PoolPort(CudaMover(pool), CellLayout.of(info))
    return TorchExecutor(info, running.forwards, running.swap, masks, port, draw_rows=running.draw_rows)


def warm_up(forwards: Forwards, draw_rows: DrawRows, info: ProgramInfo, num_cells: int) -> None:
    """Run what is large or slow the first time: the widest prefill that `num_cells` hold, giving the logits of every
    row, as log probabilities of prompts need them; prefills of few tokens, since the library has kernels of its own for
    each number of rows; and as many draws as there may be. Raises what torch raises where there is no room."""
    room = min(info.max_prefill_tokens, num_cells)
    widths = [1 << exponent for exponent in range(room.bit_length())]
    with torch.inference_mode():
        for width in [room, *widths]:
            chunks = trial_chunks(chunk_lengths(width, info.context))
            method = Method.PREFILL if width > 1 else Method.DECODE
            batch = cut(chunks, Slice(0, width, method), wanted=lambda index: True)
            assert batch is not None
            logits = forwards.run(batch, method, range(width)).rows(range(min(width, info.widths[-1])))
            draw_rows(logits, [Draw(SamplingParams(temperature=1.0, top_p=0.9), 1)] * len(logits))
            del logits


def chunk_lengths(num_tokens: int, context: int) -> list[int]:
    """Chunks of so many tokens: small ones of every kind where there is room for them, and long ones."""
    small = [length for length in _SMALL_CHUNKS if num_tokens > 2 * sum(_SMALL_CHUNKS) and length <= context]
    whole, rest = divmod(num_tokens - sum(small), context)
    return small + [context] * whole + ([rest] if rest else [])


def capture_methods(
    metadata: ProgramMetadata,
    methods: Methods,
    pool: KvPool,
    widths: Sequence[int] = PREFILL_WIDTHS,
    capture: Capture | None = None,
) -> CapturedMethods:
    """All decodes, and prefills of `widths` as far as the program has them, which give as many rows as decodes do.
    `capture` is how."""
    m, w = metadata.min_prefill_tokens, metadata.max_prefill_tokens
    most = max(methods.decodes)
    return CapturedMethods(
        methods,
        pool,
        prefills={width: max(m, min(most, width)) for width in widths if m <= width <= w},
        vocab_size=metadata.vocab_size,
        num_plans=len(distinct_windows(metadata.windows)),
        shared_heads=metadata.num_heads // metadata.num_kv_heads,
        capture=capture,
    )

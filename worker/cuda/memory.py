"""Makes a CUDA executor, and gives its pool the memory that is left when everything else has run once.

What graphs, scratch tensors and activations take is not computed but measured: a trial with a small pool captures all
widths and runs the widest prefill, and then the device says what is free.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from planner.errors import InvalidConfiguration
from planner.step import SwapIn, SwapOut
from worker.cell_image import CellLayout
from worker.cell_rows import cell_dtype
from worker.config import EngineConfig
from worker.cuda.adapted_prefill import Adapted, AdaptedPrefill
from worker.cuda.decode import CudaDecode
from worker.cuda.executor import CudaExecutor
from worker.cuda.forbid import compile_forbid
from worker.cuda.graphs import DecodeGraphs, LaunchedSteps, capture_stream
from worker.cuda.lora import CudaLoraSlots
from worker.cuda.mover import CudaMover
from worker.cuda.prefill import PrefillChain
from worker.cuda.prefill_graphs import PREFILL_WIDTHS, Prefill, PrefillGraphs, rows_given
from worker.cuda.swap import STAGING_CELLS, PinnedSwap
from worker.cuda.vendor_products import VendorProducts, vendor_products
from worker.cuda.warm_up import warm_up
from worker.executor import ProgramInfo
from worker.kernels import CellCopier
from worker.kv_pool import KvPool
from worker.masks import MaskMaker
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.rope_tables import rope_tables
from worker.pool_growth import PoolGrowth
from worker.pool_port import PoolPort

logger = logging.getLogger(__name__)


def build_cuda_executor(config: EngineConfig, info: ProgramInfo, decoder: Decoder, grammars: MaskMaker) -> CudaExecutor:
    """Size the pool (unless `config.max_cells` says how large it is), capture all widths, and run everything once.

    Raises `InvalidConfiguration` where the memory does not hold one context's cells, or not `max_cells`.
    """
    began = time.perf_counter()
    check_prefill(info, decoder.config)
    adapters = adapter_slots(config, decoder)
    cos, sin = rope_tables(decoder.config.rope, decoder.config.head_dim, info.context)
    rotary = cos.to(decoder.device), sin.to(decoder.device)

    stream = capture_stream() if config.cuda_graph else None
    vendor = vendor_products(decoder.device)

    def make(num_cells: int, initial_cells: int | None, swap_blocks: int) -> CudaExecutor:
        wanted = replace(info, num_cells=num_cells, swap_blocks=swap_blocks)
        executor = make_cuda_executor(
            wanted, decoder, rotary, initial_cells, grammars, adapters,
            with_graphs=config.cuda_graph, stream=stream, vendor=vendor,
        )  # fmt: skip
        warm_up(executor, initial_cells or num_cells)
        compile_forbid(info.vocab_size, decoder.device)
        if adapters is not None:
            with adapters.nothing() as adapter:
                warm_up(executor, initial_cells or num_cells, adapter)
        return executor

    def trial(num_cells: int) -> CudaExecutor:
        return make(num_cells, None, trial_blocks(info))

    try:
        num_cells = config.max_cells or cells_that_fit(trial, info, decoder.device, config)
        captured = time.perf_counter()
        executor = make(num_cells, initial_cells(config, num_cells), info.swap_blocks)
    except torch.OutOfMemoryError as error:
        raise InvalidConfiguration(
            f"the GPU's memory does not hold the pool and the work beside the weights: {error}",
            param="gpu_memory_utilization" if config.max_cells is None else "max_cells",
        ) from error
    logger.info("sized in %.1f s, captured in %.1f s", captured - began, time.perf_counter() - captured)
    return executor


def check_prefill(info: ProgramInfo, model: ModelConfig) -> None:
    """Raises `InvalidConfiguration` where kernels cannot count the numbers of so wide a forward's residual."""
    most = (2**31 - 1) // model.hidden_size
    if info.max_prefill_tokens > most:
        raise InvalidConfiguration(
            f"max_prefill_tokens is {info.max_prefill_tokens}; at {model.hidden_size} numbers a token no forward on a "
            f"GPU has more than {most} tokens",
            param="max_prefill_tokens",
        )


def adapter_slots(config: EngineConfig, decoder: Decoder) -> CudaLoraSlots | None:
    """Room for as many adapters as the configuration says. Raises `InvalidConfiguration` where it does not fit."""
    if not config.enable_lora:
        return None
    num_slots, rank = config.max_loras, config.max_lora_rank
    try:
        return CudaLoraSlots(decoder.config, num_slots, rank, decoder.dtype, decoder.device)
    except torch.OutOfMemoryError as error:
        raise InvalidConfiguration(
            f"the GPU's memory does not hold {num_slots} adapters of rank {rank} beside the weights: {error}",
            param="max_loras",
        ) from error


def initial_cells(config: EngineConfig, num_cells: int) -> int | None:
    """Cells that a pool of at most `num_cells` begins with; None for all of them. Raises `InvalidConfiguration`."""
    initial = config.kv_initial_cells
    if initial is not None and initial > num_cells:
        raise InvalidConfiguration(
            f"kv_initial_cells is {initial}, and the whole pool has {num_cells} cells", param="kv_initial_cells"
        )
    return initial if initial != num_cells else None


def make_cuda_executor(
    info: ProgramInfo,
    decoder: Decoder,
    rotary: tuple[Tensor, Tensor],
    initial_cells: int | None = None,
    grammars: MaskMaker | None = None,
    adapters: CudaLoraSlots | None = None,
    *,
    with_graphs: bool = True,
    stream: torch.cuda.Stream | None = None,
    vendor: VendorProducts | None = None,
) -> CudaExecutor:
    """An executor with a pool of `info.num_cells`, or one that grows to that from `initial_cells`. `rotary`: cos and
    sin, float32 [context, head_dim / 2]. `with_graphs`: whether steps are captured, where they can be; on `stream`, or
    on one of the executor's own. `vendor`: as `CudaDecode` takes it."""
    num_cells = initial_cells or info.num_cells
    dtype = cell_dtype(info.cell_dtype, decoder.dtype)
    pool = KvPool(info.num_layers, num_cells, info.num_kv_heads, info.head_dim, dtype, decoder.device)
    if with_graphs and stream is None:
        stream = capture_stream()
    capture = partial(DecodeGraphs, stream=stream) if with_graphs else LaunchedSteps
    decode = CudaDecode(
        decoder.config, decoder.weights, rotary, pool, info.widths, capture=capture, adapters=adapters, vendor=vendor
    )
    prefill = PrefillChain(decoder.config, decoder.weights, rotary, pool)
    captured = captured_prefills(info, decoder, prefill, pool, stream) if with_graphs else None
    adapted = None
    if adapters is not None:
        beside = AdaptedPrefill(prefill, adapters, info.max_prefill_tokens)
        with_adapters = captured_prefills(info, decoder, beside, pool, stream) if with_graphs else None
        adapted = Adapted(adapters, beside, with_adapters)
    swap = pinned_swap(info, pool)

    def moved() -> None:
        decode.rebind(pool)
        for graphs in (captured, None if adapted is None else adapted.captured):
            if graphs is not None:
                graphs.rebind()
        if swap is not None:
            swap.rebind(_copier(pool))

    growth = PoolGrowth(pool, info.num_cells, moved)
    port = PoolPort(CudaMover(pool), CellLayout.of(info), growth.make_room)
    return CudaExecutor(info, decoder, prefill, decode, swap, growth, grammars, port, captured, adapted)


def captured_prefills(
    info: ProgramInfo, decoder: Decoder, prefill: Prefill, pool: KvPool, stream: torch.cuda.Stream | None = None
) -> PrefillGraphs | None:
    """Prefills of the usual widths, as far as a program has them."""
    widths = [width for width in PREFILL_WIDTHS if width <= info.max_prefill_tokens]
    if not widths:
        return None
    shared_heads = decoder.config.num_heads // decoder.config.num_kv_heads
    rows = rows_given(info)
    return PrefillGraphs(prefill, widths, max_rows=rows, shared_heads=shared_heads, pool=pool, stream=stream)


def _copier(pool: KvPool) -> CellCopier:
    return CellCopier([*pool.keys, *pool.values])


def pinned_swap(info: ProgramInfo, pool: KvPool) -> PinnedSwap | None:
    """Its kernels are compiled here, not in the middle of the first preemption."""
    if not info.swap_blocks:
        return None
    space = PinnedSwap(_copier(pool), info.swap_blocks, info.swap_block_cells)
    block, cell = np.zeros(1, np.int32), np.array([pool.scratch_cell], np.int32)
    space.copy_out(SwapOut(cell, block))
    space.copy_in(SwapIn(1, block, cell))
    return space


def trial_blocks(info: ProgramInfo) -> int:
    """Blocks of a trial's swap: as much of the device's memory as with all, and little of the host's, which takes its
    time to be pinned."""
    return min(info.swap_blocks, max(1, STAGING_CELLS // info.swap_block_cells))


def cells_that_fit(make: Callable[[int], object], info: ProgramInfo, device: torch.device, config: EngineConfig) -> int:
    """Run a trial with a small pool, and see what it leaves: `make` gives all that has a pool of so many cells, and has
    run once. A pool that grows needs room for the old one beside the last one: for half of it, or for the first one
    where that is larger."""
    utilization = config.gpu_memory_utilization
    weight_bytes = torch.cuda.memory_allocated(device)
    free_before = _free_bytes(device)
    trial_cells = info.max_prefill_tokens
    trial = make(trial_cells)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    del trial
    _free_bytes(device)
    trial_bytes = (trial_cells + 1) * info.bytes_per_cell
    affordable = free + trial_bytes - int(total * (1 - utilization))
    num_cells = max(0, affordable // info.bytes_per_cell - 1)
    if config.kv_initial_cells is not None:
        num_cells = max(0, min(num_cells * 2 // 3, num_cells - config.kv_initial_cells))
    logger.info(
        "of %d bytes: weights %d, graphs and largest forward %d, pool %d in %d cells",
        total, weight_bytes, free_before - free - trial_bytes, num_cells * info.bytes_per_cell, num_cells,
    )  # fmt: skip
    if num_cells < info.context:
        raise InvalidConfiguration(
            f"{affordable} bytes are left for the pool: {num_cells} cells of {info.bytes_per_cell} bytes, and a "
            f"context is {info.context}; lower max_model_len or max_prefill_tokens, or raise gpu_memory_utilization "
            f"({utilization})",
            param="max_model_len",
        )
    return num_cells


def _free_bytes(device: torch.device) -> int:
    """After everything that nobody uses any more went back."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])

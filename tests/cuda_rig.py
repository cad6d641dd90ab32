"""A CUDA executor of a tiny random model under the real planner, beside the torch executor over the same weights.

Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1), where steps run eagerly in place of captured ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.decode_reference import random_weights
from tests.turns import E, Turns, limits_of
from worker.attention import TorchAttention
from worker.cell_image import CellLayout
from worker.cell_rows import SCALED, packed_rows, unpacked_rows
from worker.cuda.adapted_prefill import Adapted, AdaptedPrefill
from worker.cuda.decode import Capture, CudaDecode, Plan, Steps
from worker.cuda.decode_shape import decode_shape
from worker.cuda.executor import CudaExecutor
from worker.cuda.graphs import DecodeGraphs, Draw, LaunchedSteps
from worker.cuda.lora import CudaLoraSlots
from worker.cuda.prefill import PrefillChain
from worker.cuda.prefill_graphs import Prefill, PrefillGraphs, rows_given
from worker.executor import ProgramInfo
from worker.forwards import EagerForwards
from worker.kv_pool import KvPool, bytes_per_cell
from worker.masks import MaskMaker
from worker.models.config import ModelConfig
from worker.models.decoder import Decoder
from worker.models.rope import Rope
from worker.models.rope_tables import rope_tables
from worker.pool_growth import PoolGrowth
from worker.pool_port import PoolPort, TorchMover
from worker.swap import HostSwap, SwapSpace
from worker.torch_executor import TorchExecutor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CONTEXT = 256

LLAMA = ModelConfig(
    architecture="llama", vocab_size=203, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=16, norm_eps=1e-5, rope=Rope(10000.0), context=CONTEXT, windows=(None, None),
)  # fmt: skip
QWEN3 = replace(LLAMA, architecture="qwen3", num_heads=4, num_kv_heads=4, head_dim=32, qk_norm=True)
QWEN2 = replace(LLAMA, architecture="qwen2", hidden_size=56, num_heads=6, num_kv_heads=2, qkv_bias=True)
MISTRAL = replace(LLAMA, architecture="mistral", head_dim=20, windows=(9, None))
BIASED = replace(LLAMA, qkv_bias=True, output_bias=True, mlp_bias=True)
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "qwen2": QWEN2, "mistral": MISTRAL, "biased": BIASED}


class Captures:
    """Makes steps ready as the device allows, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: Callable[[int, Draw], None], widths: Sequence[int], draws: Sequence[Draw]) -> Steps:
        self.count += 1
        return LaunchedSteps(step, widths, draws) if INTERPRETED else DecodeGraphs(step, widths, draws)


@dataclass(frozen=True)
class Model:
    """Weights on the device, in float32 unless told otherwise, with decoders over them."""

    decoder: Decoder
    rotary: tuple[torch.Tensor, torch.Tensor]
    dtype: torch.dtype

    def info(self, num_cells: int, widths: tuple[int, ...], max_prefill_tokens: int, **changes: Any) -> ProgramInfo:
        config = self.decoder.config
        return ProgramInfo(
            name="tiny", architecture=config.architecture, vocab_size=config.vocab_size, context=CONTEXT,
            max_prefill_tokens=max_prefill_tokens, min_prefill_tokens=2, widths=widths, num_cells=num_cells,
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            dtype=str(self.dtype), device=str(DEVICE), vector_size=config.hidden_size, **changes,
            bytes_per_cell=bytes_per_cell(config.num_layers, config.num_kv_heads, config.head_dim, self.dtype),
        )  # fmt: skip

    def pool(self, num_cells: int, kind: type[KvPool] = KvPool, cell_dtype: torch.dtype | None = None) -> KvPool:
        config, dtype = self.decoder.config, cell_dtype or self.dtype
        pool = kind(config.num_layers, num_cells, config.num_kv_heads, config.head_dim, dtype, DEVICE)
        # Cells that nobody wrote hold NaN: whoever reads one is found out.
        nothing = 255 if dtype == SCALED else float("nan")
        pool.keys[:, :num_cells], pool.values[:, :num_cells] = nothing, nothing
        return pool


class RoundedPool(KvPool):
    """Keeps in the model's dtype what cells of `cell_dtype` would hold."""

    def __init__(self, pool: KvPool, cell_dtype: torch.dtype) -> None:
        self.keys, self.values, self.num_cells, self.dtype = pool.keys, pool.values, pool.num_cells, pool.dtype
        self._cell_dtype = cell_dtype

    def write(self, layer: int, cells: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        super().write(layer, cells, self._rounded(key), self._rounded(value))

    def _rounded(self, heads: torch.Tensor) -> torch.Tensor:
        if self._cell_dtype == SCALED:
            return unpacked_rows(packed_rows(heads), *heads.shape[1:]).to(heads.dtype)
        return heads.to(self._cell_dtype).to(heads.dtype)


def tiny_model(name: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 1, **changes: Any) -> Model:
    """`changes` are of the named model's configuration."""
    config = replace(MODELS[name], **changes)
    weights = random_weights(decode_shape(config, CONTEXT, dtype), DEVICE, seed)
    cos, sin = rope_tables(config.rope, config.head_dim, CONTEXT)
    return Model(Decoder(config, weights, CONTEXT), (cos.to(DEVICE), sin.to(DEVICE)), dtype)


def torch_executor(
    model: Model,
    num_cells: int = 1024,
    max_prefill_tokens: int = 64,
    grammars: MaskMaker | None = None,
    cell_dtype: torch.dtype | None = None,
) -> TorchExecutor:
    """With a `cell_dtype`, cells hold what they would in that."""
    pool = model.pool(num_cells)
    pool.keys.nan_to_num_(0.0)
    pool.values.nan_to_num_(0.0)
    if cell_dtype is not None:
        pool = RoundedPool(pool, cell_dtype)
    forwards = EagerForwards(model.decoder, pool, lambda pool, spans, windows, _: TorchAttention(pool, spans, windows))
    info = model.info(num_cells, (1, 2, 4, 8, 16), max_prefill_tokens)
    return TorchExecutor(info, forwards, grammars=grammars)


def cuda_executor(
    model: Model,
    num_cells: int = 1024,
    max_prefill_tokens: int = 64,
    widths: tuple[int, ...] = (1, 2, 4, 8),
    prefill: Callable[[PrefillChain], Any] = lambda chain: chain,
    swap_blocks: int = 0,
    swap_block_cells: int = 4,
    grammars: MaskMaker | None = None,
    pool: KvPool | None = None,
    captures: Capture | None = None,
    captured_widths: tuple[int, ...] = (),
    cell_dtype: torch.dtype | None = None,
    adapters: CudaLoraSlots | None = None,
    plan: Plan | None = None,
    around_decode: Callable[[CudaDecode], Any] = lambda decode: decode,
) -> CudaExecutor:
    """`prefill` may put something around the executor's prefill chain, `around_decode` around its decode. A `pool` with
    fewer cells than `num_cells` grows."""
    swaps = {"swap_blocks": swap_blocks, "swap_block_cells": swap_block_cells}
    info, config = model.info(num_cells, widths, max_prefill_tokens, **swaps), model.decoder.config
    pool = pool or model.pool(num_cells, cell_dtype=cell_dtype)
    decode = CudaDecode(
        config, model.decoder.weights, model.rotary, pool, widths, capture=captures or Captures(), plan=plan,
        adapters=adapters,
    )  # fmt: skip
    chain = prefill(PrefillChain(config, model.decoder.weights, model.rotary, pool))
    swap = swap_space(info, pool)
    captured = _captured(chain, captured_widths, rows_given(info), config, pool)
    adapted = None
    if adapters is not None:
        beside = AdaptedPrefill(chain, adapters, max_prefill_tokens)
        adapted = Adapted(adapters, beside, _captured(beside, captured_widths, rows_given(info), config, pool))
    graphs = [each for each in (captured, adapted and adapted.captured) if isinstance(each, PrefillGraphs)]
    growth = PoolGrowth(pool, num_cells, lambda: rebind(pool, decode, swap, graphs))
    port = pool_port(pool, CellLayout.of(info), growth)
    return CudaExecutor(
        info, model.decoder, chain, around_decode(decode), swap, growth, grammars, port, captured, adapted
    )


def _captured(
    prefill: Prefill, captured_widths: tuple[int, ...], max_rows: int, config: ModelConfig, pool: KvPool
) -> PrefillGraphs | None:
    if not captured_widths:
        return None
    return PrefillGraphs(
        prefill, captured_widths, max_rows=max_rows, shared_heads=config.num_heads // config.num_kv_heads, pool=pool,
        capture=(lambda forward: forward) if INTERPRETED else None,
    )  # fmt: skip


def pool_port(pool: KvPool, layout: CellLayout, growth: PoolGrowth) -> PoolPort:
    if INTERPRETED:
        return PoolPort(TorchMover(pool), layout, growth.make_room)
    from worker.cuda.mover import CudaMover

    return PoolPort(CudaMover(pool), layout, growth.make_room)


def rebind(pool: KvPool, decode: CudaDecode, swap: SwapSpace | None, captured: Sequence[PrefillGraphs]) -> None:
    decode.rebind(pool)
    for graphs in captured:
        graphs.rebind()
    if not (swap is None or isinstance(swap, HostSwap)):
        from worker.cuda.swap import PinnedSwap
        from worker.kernels import CellCopier

        assert isinstance(swap, PinnedSwap)
        swap.rebind(CellCopier([*pool.keys, *pool.values]))


def swap_space(info: ProgramInfo, pool: KvPool) -> SwapSpace | None:
    if not info.swap_blocks:
        return None
    if INTERPRETED:
        return HostSwap(pool, info.swap_blocks, info.swap_block_cells)
    from worker.cuda.swap import PinnedSwap
    from worker.kernels import CellCopier

    copier = CellCopier([*pool.keys, *pool.values])
    return PinnedSwap(copier, info.swap_blocks, info.swap_block_cells)


class FullDecode:
    """A decode whose device has no room for the n-th call of one of its methods."""

    def __init__(self, decode: CudaDecode, method: str, failing: int) -> None:
        self._decode, self._method, self._failing, self._num_calls = decode, method, failing, 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._method else getattr(self._decode, name)

    def _call(self, *args: Any) -> Any:
        self._num_calls += 1
        if self._num_calls == self._failing:
            raise torch.OutOfMemoryError("no room for it")
        return getattr(self._decode, self._method)(*args)


class Rig(Turns[E]):
    """Small steps, so that a few requests make many of them; `depth` of them may be in flight."""

    def __init__(self, executor: E, *, depth: int = 1, max_num_seqs: int = 8, **changes: Any) -> None:
        """`changes` are further limits."""
        fields = {
            "max_num_seqs": max_num_seqs,
            "max_batched_tokens": 64,
            "prefill_chunk_tokens": 16,
            "max_steps_in_flight": depth,
        }
        super().__init__(limits_of(executor.info, **(fields | changes)), executor)

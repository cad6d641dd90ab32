"""Forwards of a decoder on the CPU in float32: those of a few lone tokens by compiled passes, all others in torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from planner.slices import Method
from worker.batch import Batch
from worker.cpu.attention import use_threads_of_torch
from worker.cpu.block_forwards import BlockForwards, has_block_pass
from worker.cpu.blocks import prepare_products, product
from worker.cpu.decode import add_norm, compile_rotate_attend
from worker.cpu.linear import MOST_ROWS, compile_small_linear, run
from worker.cpu.seen import seen_cells
from worker.forwards import EagerForwards, Forwards, ReadyLogits, SelectedLogits
from worker.kv_pool import KvPool
from worker.lora import LoraSlots
from worker.models.block_matrix import BlockMatrix
from worker.models.decoder import Beside, Decoder, matrix_at
from worker.models.layers import rms_norm
from worker.models.lora import Site

# Rows that together see fewer cells are done before a second thread has woken up.
_FEW_SEEN = 512
_NO_NORM = np.empty(0, dtype=np.float32)


def forwards_of(decoder: Decoder, pool: KvPool, adapters: LoraSlots | None = None) -> Forwards:
    """The fastest way that there is to run `decoder`, with `adapters` beside it, outside of a GPU's own executor."""
    if decoder.device.type == "cpu" and decoder.dtype == torch.float32 and not decoder.weights.is_quantized:
        if adapters is None and has_block_pass(decoder):
            return BlockForwards(decoder, pool)
        return CpuForwards(decoder, pool, adapters)
    return EagerForwards(decoder, pool, adapters=adapters)


class CpuForwards:
    """A `Forwards`."""

    def __init__(self, decoder: Decoder, pool: KvPool, adapters: LoraSlots | None = None) -> None:
        """`decoder` is in float32 on the CPU, `pool` has its geometry. Compiles kernels, once a machine."""
        config = decoder.config
        self._decoder = decoder
        self._pool = pool
        self._adapters = adapters
        self._eager = EagerForwards(decoder, pool, adapters=adapters)
        self._num_beats = 0
        for matrix in decoder.weights.kept_in_blocks:
            prepare_products(matrix.tiles.layout)
        self._small_linear = compile_small_linear()
        shared = config.num_heads // config.num_kv_heads
        self._rotate_attend = compile_rotate_attend(config.head_dim, shared, parallel=True)
        self._rotate_attend_few = compile_rotate_attend(config.head_dim, shared, parallel=False)
        self._cos, self._sin = decoder.cos.numpy(), decoder.sin.numpy()

    @property
    def num_beats(self) -> int:
        return self._num_beats + self._eager.num_beats

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        if not len(batch.pieces) == len(batch.tokens) <= MOST_ROWS:
            return self._eager.run(batch, method, wanted)
        use_threads_of_torch()
        hidden = self._decode(batch, None if self._adapters is None else self._adapters.beside(batch))
        logits = self._logits(hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64)))
        return ReadyLogits(logits, wanted, hidden, self._decoder)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(weight, BlockMatrix):
            return product(x, weight.tiles, bias)
        return run(self._small_linear, x, weight, bias)

    def _product(self, x: Tensor, layer: int, site: Site, beside: Beside | None) -> Tensor:
        product = self._linear(x, *matrix_at(self._decoder.weights.layers[layer], site))
        if beside is not None:
            beside.add(layer, site, x, product)
        return product

    def _logits(self, hidden: Tensor) -> Tensor:
        self._num_beats += 1
        weights = self._decoder.weights
        return self._linear(rms_norm(hidden, weights.final_norm, self._decoder.config.norm_eps), weights.head, None)

    def _decode(self, batch: Batch, beside: Beside | None) -> Tensor:
        config, weights = self._decoder.config, self._decoder.weights
        hidden = functional.embedding(torch.from_numpy(batch.tokens), weights.embedding)
        num_rows, num_heads = len(hidden), config.num_heads + 2 * config.num_kv_heads
        normed, delta = torch.empty_like(hidden), torch.zeros_like(hidden)
        mixed = hidden.new_empty((num_rows, config.num_heads, config.head_dim))
        seen = seen_cells(batch, config.windows)
        rotate_attend = self._rotate_attend_few if len(seen.cells) <= _FEW_SEEN else self._rotate_attend
        for index, layer in enumerate(weights.layers):
            self._num_beats += 1
            add_norm(hidden.numpy(), delta.numpy(), layer.attention_norm.numpy(), config.norm_eps, normed.numpy())
            heads = self._product(normed, index, Site.QKV, beside)
            rotate_attend(
                heads.view(num_rows, num_heads, config.head_dim).numpy(),
                *(_NO_NORM if norm is None else norm.numpy() for norm in (layer.query_norm, layer.key_norm)),
                config.norm_eps,
                self._cos,
                self._sin,
                batch.positions,
                self._pool.keys[index].numpy(),
                self._pool.values[index].numpy(),
                seen.cells,
                seen.firsts[config.windows[index]],
                seen.ends,
                mixed.numpy(),
            )
            delta = self._product(mixed.view(num_rows, -1), index, Site.OUTPUT, beside)
            add_norm(hidden.numpy(), delta.numpy(), layer.mlp_norm.numpy(), config.norm_eps, normed.numpy())
            gate, up = self._product(normed, index, Site.GATE_UP, beside).chunk(2, dim=-1)
            delta = self._product(functional.silu(gate).mul_(up), index, Site.DOWN, beside)
        return hidden.add_(delta)

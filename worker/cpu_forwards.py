"""Forwards of a decoder on the CPU in float32.

All layers are one compiled pass where every matrix is kept in blocks. Where not, a few lone tokens go through passes
that are compiled one by one, and all else through torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from planner.slices import Method
from worker.batch import Batch
from worker.cpu_attention import use_threads_of_torch
from worker.cpu_block_pass import BlockPass, has_block_pass
from worker.cpu_blocks import prepare_products, product
from worker.cpu_decode import add_norm, compile_rotate_attend
from worker.cpu_linear import MOST_ROWS, compile_small_linear, run
from worker.cpu_seen import seen_cells
from worker.forwards import EagerForwards, Forwards, SelectedLogits
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
        return CpuForwards(decoder, pool, adapters)
    return EagerForwards(decoder, pool, adapters=adapters)


class CpuForwards:
    """A `Forwards`."""

    def __init__(self, decoder: Decoder, pool: KvPool, adapters: LoraSlots | None = None) -> None:
        """`decoder` is in float32 on the CPU, `pool` has its geometry. Compiles kernels, once a machine. With
        `adapters`, of which the one pass knows nothing, it does without that pass."""
        config = decoder.config
        self._decoder = decoder
        self._pool = pool
        self._adapters = adapters
        self._blocks = BlockPass(decoder, pool) if adapters is None and has_block_pass(decoder) else None
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
        of_blocks = self._blocks.num_beats if self._blocks is not None else 0
        return self._num_beats + self._eager.num_beats + of_blocks

    def run(self, batch: Batch, method: Method, wanted: Sequence[int]) -> SelectedLogits:
        num_rows = len(batch.tokens)
        if self._blocks is not None:
            hidden = self._blocks.run(batch)
        elif len(batch.pieces) == num_rows <= MOST_ROWS:
            use_threads_of_torch()
            hidden = self._decode(batch, None if self._adapters is None else self._adapters.beside(batch))
        else:
            return self._eager.run(batch, method, wanted)
        logits = self._logits(hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64)))
        return _Logits(logits, wanted, hidden, self._decoder)

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


class _Logits:
    """Logits of the rows that were wanted, computed already."""

    def __init__(self, logits: Tensor, wanted: Sequence[int], hidden: Tensor, decoder: Decoder) -> None:
        self._logits = logits
        self._wanted = list(wanted)
        self._hidden = hidden
        self._decoder = decoder

    def rows(self, rows: Sequence[int]) -> Tensor:
        if list(rows) == self._wanted:
            return self._logits
        return self._logits.index_select(0, torch.tensor([self._wanted.index(row) for row in rows]))

    def normed(self, first: int, end: int) -> Tensor:
        return self._decoder.normed(self._hidden[first:end])

"""The layers of a packed prefill forward on the GPU: few launches a layer, nothing kept but cells.

The maths is `worker.models.decoder`'s, which the tests compare it with; here the norms of heads, the rotation and the
write to cells are one kernel, and so are add-and-norm and SwiGLU's product. Matrix products are the vendor library's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.cuda.decode_buffers import next_power_of_2
from worker.cuda.launch import launch_options, of_grids
from worker.cuda.lora import LoraRows
from worker.cuda.norm import add_norm_kernel, silu_kernel
from worker.cuda.prefill_attention import attend
from worker.cuda.prefill_plan import PrefillPlan
from worker.cuda.write_cells import rotate_and_write
from worker.kv_pool import KvPool
from worker.models.config import ModelConfig
from worker.models.layers import rms_norm
from worker.models.lora import Site
from worker.models.weights import DecoderWeights

_SILU_BLOCK = 1024


class PrefillChain:
    """One model's prefill forwards over one pool. `rotary`: cos and sin, float32 [context, head_dim / 2]."""

    def __init__(
        self, config: ModelConfig, weights: DecoderWeights, rotary: tuple[Tensor, Tensor], pool: KvPool
    ) -> None:
        self._config = config
        self._weights = weights
        self._cos, self._sin = rotary
        self._pool = pool

    def hidden(self, tokens: Tensor, plan: PrefillPlan, rows: Tensor, beside: LoraRows | None = None) -> Tensor:
        """Run all layers over `tokens` int64[T], laid out as in `plan`. Returns rows `rows`, int64[K], of what the
        last layer gives: [K, E], before the last norm.

        Keys and values of all tokens are in their cells afterwards; beyond them the last layer runs only the rows
        asked for. `beside` adds rows' adapters to the products. Raises torch's `OutOfMemoryError` where the
        activations do not fit.
        """
        config, layers = self._config, self._weights.layers
        residual = functional.embedding(tokens, self._weights.embedding)
        normed = rms_norm(residual, layers[0].attention_norm, config.norm_eps)
        for index, layer in enumerate(layers):
            qkv = _added(beside, index, Site.QKV, normed, functional.linear(normed, layer.qkv, layer.qkv_bias))
            attended = self._attended(index, qkv, plan)
            if index + 1 == len(layers):
                beside = None if beside is None else beside.of(rows)
                attended, residual = attended.index_select(0, rows), residual.index_select(0, rows)
                normed = torch.empty_like(residual)
            projected = _added(beside, index, Site.OUTPUT, attended, functional.linear(attended, layer.output))
            self._add_norm(projected, layer.output_bias, residual, layer.mlp_norm, normed)
            gate_up = _added(beside, index, Site.GATE_UP, normed, functional.linear(normed, layer.gate_up))
            active = self._gated(gate_up, layer.gate_up_bias)
            projected = _added(beside, index, Site.DOWN, active, functional.linear(active, layer.down))
            if index + 1 < len(layers):
                self._add_norm(projected, layer.down_bias, residual, layers[index + 1].attention_norm, normed)
            else:
                residual += projected if layer.down_bias is None else projected.add_(layer.down_bias)
        return residual

    def _attended(self, index: int, qkv: Tensor, plan: PrefillPlan) -> Tensor:
        config, layer = self._config, self._weights.layers[index]
        keys, values = self._pool.layer(index)
        query, attended = qkv.new_empty((2, len(qkv), config.num_heads, config.head_dim)).unbind()
        rotate_and_write(
            qkv, plan.positions, plan.new_cells, self._cos, self._sin, keys, values, query,
            layer.query_norm, layer.key_norm, config.norm_eps,
        )  # fmt: skip
        attend(query, keys, values, plan, attended, config.windows[index])
        return attended.view(len(qkv), -1)

    def _add_norm(self, added: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor, normed: Tensor) -> None:
        """`residual` += `added` (+ `bias`); `normed` = its norm."""
        num_rows, hidden = residual.shape
        if num_rows == 0:
            return
        add_norm_kernel[(num_rows,)](
            added, 0, norm if bias is None else bias, residual, norm, normed, normed, normed,
            self._config.norm_eps, HIDDEN=hidden, BLOCK=next_power_of_2(hidden), SPLITS=1, HAS_BIAS=bias is not None,
            CODED=False, NATIVE=normed.is_cuda, EARLY=False,
            **launch_options(8 if hidden > 1024 else 4),
        )  # fmt: skip

    def _gated(self, gate_up: Tensor, bias: Tensor | None) -> Tensor:
        ffn = self._config.intermediate_size
        active = gate_up.new_empty((len(gate_up), ffn))
        if len(active) == 0:
            return active
        for rows, out in zip(of_grids(gate_up), of_grids(active), strict=True):
            silu_kernel[(-(-ffn // _SILU_BLOCK), len(rows))](
                rows, rows if bias is None else bias, out, FFN=ffn, BLOCK=_SILU_BLOCK, HAS_BIAS=bias is not None,
                **launch_options(4),
            )  # fmt: skip
        return active


def _added(beside: LoraRows | None, layer: int, site: Site, x: Tensor, product: Tensor) -> Tensor:
    """`product` of `x`, and what rows' adapters add to it."""
    if beside is not None:
        beside.add(layer, site, x, product)
    return product

"""Launches one whole decode step: embedding, layers, LM head, the drawn token and its feedback. Capturable.

`DecodeChain.run` only launches kernels on torch's current stream, with addresses and sizes that depend on nothing but
the width, so a captured run can be replayed for any sequences. Layers of several rows are here, those of one row in
`row_layers` and the end in `decode_end`; which kernels a width uses is `decode_plan`'s choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from worker.cuda.cell_scales import row_constants
from worker.cuda.decode_attention import LOG2_E, attention_kernel
from worker.cuda.decode_buffers import DecodeBuffers, next_power_of_2
from worker.cuda.decode_end import DecodeEnd, Sampler
from worker.cuda.decode_plan import Chain, DecodePlan
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.decode_state import DecodeState
from worker.cuda.norm import add_norm_kernel, embed_kernel, silu_kernel
from worker.cuda.row_layers import RowLayers
from worker.cuda.step_products import StepProducts
from worker.cuda.tiles import LinearTile
from worker.cuda.vendor_products import VendorProducts
from worker.models.decoder import Beside
from worker.models.lora import Site
from worker.models.weights import DecoderWeights, LayerWeights

logger = logging.getLogger(__name__)


class DecodeChain:
    """One model's decode steps over one pool. `pool`: K and V of each layer as `KvPool.layer` gives them, the last
    cell being scratch. `rotary`: cos and sin, float32 [context, head_dim / 2], element i turning with i + head_dim / 2.
    All weights are contiguous. All tensors must stay where they are for as long as a captured step is replayed."""

    def __init__(
        self,
        shape: DecodeShape,
        weights: DecoderWeights,
        rotary: tuple[torch.Tensor, torch.Tensor],
        pool: Sequence[tuple[torch.Tensor, torch.Tensor]],
        state: DecodeState,
        buffers: DecodeBuffers,
        vendor: VendorProducts | None = None,
    ) -> None:
        """Without `vendor` the library's products are torch's."""
        assert len(pool) == len(weights.layers) == shape.num_layers
        for table in rotary:
            assert table.dtype == torch.float32
            assert table.shape == (shape.context, shape.head_dim // 2)
        self._cos, self._sin = rotary
        self._shape, self._weights, self._pool, self._state, self._buffers = shape, weights, pool, state, buffers
        self._rows = RowLayers(shape, buffers, self._attend_row)
        self._products = StepProducts(shape, buffers, vendor)
        self._end = DecodeEnd(shape, weights.head, state, buffers)

    def prepare(self, plans: Mapping[int, DecodePlan]) -> None:
        """Tries the library's kernels for what these plans, by width, leave to it. While nothing else runs on the
        device, and outside of captures."""
        began = time.perf_counter()
        tried = sum(self._products.choose(width, plan, self._weights.layers) for width, plan in plans.items())
        if tried:
            logger.info("tried kernels for %d of the library's products in %.1f s", tried, time.perf_counter() - began)

    def run(self, width: int, plan: DecodePlan, sampler: Sampler | None = None, beside: Beside | None = None) -> None:
        """Launches the step of rows [0, width). Without a sampler every row takes the arg max, lowest id on ties.
        What is computed `beside` the products wants a chain that leaves them whole."""
        assert beside is None or plan.chain is Chain.LIBRARY or plan.whole_gate_up
        assert width <= self._state.max_rows
        gemv = plan.chain is Chain.GEMV
        self._buffers.fits(self._shape, width, plan)
        self._embed(width, plan, scaled=gemv)
        self._products.coded(self._buffers.normed, width, plan)
        weights = self._weights
        num_sums = 1
        for index, layer in enumerate(weights.layers):
            last = index + 1 == len(weights.layers)
            next_norm = weights.final_norm if last else weights.layers[index + 1].attention_norm
            if gemv:
                num_sums = self._rows.run(index, layer, next_norm, num_sums, plan)
            elif plan.chain is Chain.SPLIT_K:
                self._split_layer(index, layer, next_norm, width, plan, beside)
            else:
                self._library_layer(index, layer, next_norm, width, plan, beside)
        self._end.run(width, plan, num_sums, sampler)

    def _embed(self, width: int, plan: DecodePlan, *, scaled: bool) -> None:
        s, w, b, state, tile = self._shape, self._weights, self._buffers, self._state, plan.attention
        embed_kernel[(width,)](
            state.row_slots, state.new_cells, state.last_token, state.length, state.table, state.context,
            w.embedding, w.layers[0].attention_norm, b.residual, b.normed, b.sums, s.norm_eps,
            width, state.scratch_slot, s.most_attended, b.work, b.num_pieces,
            HIDDEN=s.hidden, BLOCK=next_power_of_2(s.hidden), SCALED=scaled,
            ROWS=next_power_of_2(width), PIECES=tile.pieces or 0, SHARE=tile.share,
            **plan.launch(8 if s.hidden > 1024 else 4),
        )  # fmt: skip

    def _attend(
        self, index: int, layer: LayerWeights, qkv: torch.Tensor, splits: int, width: int, plan: DecodePlan
    ) -> None:
        s, b, state, tile = self._shape, self._buffers, self._state, plan.attention
        k_pool, v_pool = self._pool[index]
        rows = row_constants(k_pool, s.num_kv_heads, s.head_dim)
        k_scales, v_scales = (p.view(torch.float32) if rows["SCALED"] else p for p in (k_pool, v_pool))
        window = s.windows[index]
        none = b.sums  # stands in for the pointers that this model's kernel never reads
        listed = tile.pieces is not None
        padded_dim = max(32 if rows["SCALED"] else 16, next_power_of_2(s.head_dim))
        grid = (s.num_kv_heads, tile.programs(width)) if listed else (s.num_kv_heads, tile.splits, width)
        attention_kernel[grid](
            qkv, b.padded_rows * s.qkv_columns,
            layer.qkv_bias if layer.qkv_bias is not None else none,
            layer.query_norm if layer.query_norm is not None else none,
            layer.key_norm if layer.key_norm is not None else none,
            self._cos, self._sin, state.row_slots, state.length, state.new_cells, state.table, state.context,
            k_pool, v_pool, k_scales, v_scales, b.attended, b.part_out, b.part_max, b.part_sum, b.arrived, b.work,
            b.num_pieces,
            s.head_dim**-0.5 * LOG2_E, s.norm_eps, window or 0,
            HEADS=s.num_heads, KV_HEADS=s.num_kv_heads, D=s.head_dim,
            D_PADDED=padded_dim, FIRST=not rows["SCALED"] and tile.loads_first(padded_dim),
            LIST_WAITS=listed and plan.early_qkv,
            GROUP_PADDED=max(16, next_power_of_2(s.num_heads // s.num_kv_heads)), QKV_SPLITS=splits,
            SPLITS=tile.splits, SHARE=tile.share, BLOCK=tile.block, HAS_BIAS=layer.qkv_bias is not None,
            QK_NORM=s.qk_norm, WINDOWED=window is not None, LISTED=listed,
            **rows,
            **plan.launch(tile.warps, tile.stages),
        )  # fmt: skip

    def _attend_row(self, index: int, layer: LayerWeights, qkv: torch.Tensor, plan: DecodePlan) -> None:
        self._attend(index, layer, qkv, 1, 1, plan)

    def _split_layer(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        width: int,
        plan: DecodePlan,
        beside: Beside | None,
    ) -> None:
        products, b, tiles = self._products, self._buffers, plan.linear
        assert tiles is not None

        def split(site: Site, x: torch.Tensor, w: torch.Tensor, tile: LinearTile) -> None:
            products.split(x, w, width, plan, tile)
            if beside is not None:  # a term of the sum
                beside.add(index, site, x[:width], b.partials[: width * len(w)].view(width, len(w)))

        split(Site.QKV, b.normed, layer.qkv, tiles.qkv)
        self._attend(index, layer, b.partials, tiles.qkv.splits, width, plan)
        products.coded(b.attended, width, plan, tiles.o)
        split(Site.OUTPUT, b.attended, layer.output, tiles.o)
        self._add_norm(b.partials, tiles.o.splits, layer.output_bias, layer.mlp_norm, width, plan, tiles.gate_up)
        if plan.whole_gate_up:
            split(Site.GATE_UP, b.normed, layer.gate_up, tiles.gate_up)
            self._silu(b.partials, None, width, plan)
        else:
            products.gate_up(b.normed, layer.gate_up, width, plan, tiles.gate_up)
        products.coded(b.active, width, plan, tiles.down)
        split(Site.DOWN, b.active, layer.down, tiles.down)
        self._add_norm(b.partials, tiles.down.splits, layer.down_bias, next_norm, width, plan, tiles.qkv)

    def _library_layer(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        width: int,
        plan: DecodePlan,
        beside: Beside | None,
    ) -> None:
        products, b = self._products, self._buffers

        def whole(site: Site, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
            products.whole(x, w, out, width)
            if beside is not None:
                beside.add(index, site, x[:width], out[:width])

        whole(Site.QKV, b.normed, layer.qkv, b.qkv)
        self._attend(index, layer, b.qkv, 1, width, plan)
        products.coded(b.attended, width, plan)
        whole(Site.OUTPUT, b.attended, layer.output, b.projected)
        self._add_norm(b.projected, 1, layer.output_bias, layer.mlp_norm, width, plan)
        whole(Site.GATE_UP, b.normed, layer.gate_up, b.gate_up)
        self._silu(b.gate_up, layer.gate_up_bias, width, plan)
        products.coded(b.active, width, plan)
        if plan.down_parts > 1:
            assert beside is None, "what is added to a product wants it whole"
            products.parts(b.active, layer.down, width, plan.down_parts)
            self._add_norm(b.partials, plan.down_parts, layer.down_bias, next_norm, width, plan)
        else:
            whole(Site.DOWN, b.active, layer.down, b.projected)
            self._add_norm(b.projected, 1, layer.down_bias, next_norm, width, plan)

    def _silu(self, gate_up: torch.Tensor, bias: torch.Tensor | None, width: int, plan: DecodePlan) -> None:
        ffn = self._shape.ffn
        silu_kernel[(-(-ffn // 1024), width)](
            gate_up, gate_up if bias is None else bias, self._buffers.active, FFN=ffn, BLOCK=1024,
            HAS_BIAS=bias is not None, **plan.launch(4),
        )  # fmt: skip

    def _add_norm(
        self,
        partials: torch.Tensor,
        splits: int,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        width: int,
        plan: DecodePlan,
        tile: LinearTile | None = None,
    ) -> None:
        """`tile`: of the product that comes."""
        s, b, coded = self._shape, self._buffers, self._products.takes_codes
        add_norm_kernel[(width,)](
            partials, b.padded_rows * s.hidden, norm if bias is None else bias, b.residual, norm, b.normed,
            b.codes.of(s.hidden) if coded else b.normed, b.codes.scales, s.norm_eps,
            HIDDEN=s.hidden, BLOCK=next_power_of_2(s.hidden), SPLITS=splits, HAS_BIAS=bias is not None,
            CODED=coded, NATIVE=partials.is_cuda,
            EARLY=tile is not None and tile.ahead > 0,
            **plan.launch(8 if s.hidden > 1024 else 4),
        )  # fmt: skip

"""Launches one whole decode step: embedding, layers, LM head, the drawn token and its feedback. Capturable.

`DecodeChain.run` only launches kernels on torch's current stream, with addresses and sizes that depend on nothing but
the width, so a captured run can be replayed for any sequences. The kernels are in `norm`, `gemv`, `linear`
and `decode_attention`; which of them a width uses is `decode_plan`'s choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from worker.cuda.cell_scales import row_constants
from worker.cuda.decode_attention import LOG2_E, attention_kernel
from worker.cuda.decode_buffers import ARG_MAX_BLOCK, DecodeBuffers, head_programs, next_power_of_2
from worker.cuda.decode_parts import reduce_kernel
from worker.cuda.decode_plan import Chain, DecodePlan, GemvTile, GemvTiles, LinearTile, Reduce
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.decode_state import DecodeState
from worker.cuda.gemv import head_gemv_kernel, normed_gate_up_gemv_kernel, normed_gemv_kernel, residual_gemv_kernel
from worker.cuda.linear import gate_up_kernel, head_kernel, split_linear_kernel
from worker.cuda.norm import add_norm_kernel, advance_kernel, arg_max_kernel, embed_kernel, pick_kernel, silu_kernel
from worker.cuda.packed import PackedMatrix, packed_matrices, values_of
from worker.cuda.packed_products import gate_up_gemv, gate_up_product, normed_gemv, residual_gemv, split_product
from worker.models.decoder import Beside
from worker.models.lora import Site
from worker.models.weights import DecoderWeights, LayerWeights

Sampler = Callable[[torch.Tensor, torch.Tensor, DecodeState], None]
"""Draws from logits [rows, vocab] for the slots row_slots int32[rows] into state.out_tokens[:rows] (and marks
state.bad_rows[:rows]), on the current stream, without waiting for the device."""


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
    ) -> None:
        assert len(pool) == len(weights.layers) == shape.num_layers
        for table in rotary:
            assert table.dtype == torch.float32
            assert table.shape == (shape.context, shape.head_dim // 2)
        self._cos, self._sin = rotary
        self._shape, self._weights, self._pool, self._state, self._buffers = shape, weights, pool, state, buffers

    def run(self, width: int, plan: DecodePlan, sampler: Sampler | None = None, beside: Beside | None = None) -> None:
        """Launches the step of rows [0, width). Without a sampler every row takes the arg max, lowest id on ties.
        What is computed `beside` the products wants a chain that leaves them whole."""
        assert beside is None or plan.chain is Chain.LIBRARY or plan.whole_gate_up
        assert width <= self._state.max_rows
        gemv = plan.chain is Chain.GEMV
        self._buffers.fits(self._shape, width, plan)
        self._embed(width, plan, scaled=gemv)
        weights = self._weights
        num_sums = 1
        for index, layer in enumerate(weights.layers):
            last = index + 1 == len(weights.layers)
            next_norm = weights.final_norm if last else weights.layers[index + 1].attention_norm
            if gemv:
                num_sums = self._gemv_layer(index, layer, next_norm, num_sums, plan)
            elif plan.chain is Chain.SPLIT_K:
                self._split_layer(index, layer, next_norm, width, plan, beside)
            else:
                self._library_layer(index, layer, next_norm, width, plan, beside)
        self._head(width, plan, num_sums, store_logits=sampler is not None)
        self._finish(width, plan, sampler)

    def _embed(self, width: int, plan: DecodePlan, *, scaled: bool) -> None:
        s, w, b, state, tile = self._shape, self._weights, self._buffers, self._state, plan.attention
        embed_kernel[(width,)](
            state.row_slots, state.new_cells, state.last_token, state.length, state.table, state.context,
            w.embedding, w.layers[0].attention_norm, b.residual, b.normed, b.sums, s.norm_eps,
            width, state.scratch_slot, s.most_attended, b.work, b.num_pieces,
            HIDDEN=s.hidden, BLOCK=next_power_of_2(s.hidden), SCALED=scaled,
            ROWS=next_power_of_2(width), PIECES=tile.pieces or 0, SHARE=tile.share,
            **_launch(plan, 8 if s.hidden > 1024 else 4),
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
            D_PADDED=max(32 if rows["SCALED"] else 16, next_power_of_2(s.head_dim)),
            GROUP_PADDED=max(16, next_power_of_2(s.num_heads // s.num_kv_heads)), QKV_SPLITS=splits,
            SPLITS=tile.splits, SHARE=tile.share, BLOCK=tile.block, HAS_BIAS=layer.qkv_bias is not None,
            QK_NORM=s.qk_norm, WINDOWED=window is not None, LISTED=listed,
            LAST_REDUCES=tile.reduce is Reduce.LAST_PROGRAM, **rows,
            **_launch(plan, tile.warps, tile.stages),
        )  # fmt: skip
        if tile.splits > 1 and tile.reduce is Reduce.KERNEL:
            reduce_kernel[(s.num_heads, width)](
                b.part_out, b.part_max, b.part_sum, b.attended, state.row_slots, state.length, window or 0,
                HEADS=s.num_heads, SPLITS=tile.splits, SHARE=tile.share, D=s.head_dim,
                D_PADDED=max(16, next_power_of_2(s.head_dim)), WINDOWED=window is not None, **_launch(plan, 4),
            )  # fmt: skip

    def _gemv_layer(
        self, index: int, layer: LayerWeights, next_norm: torch.Tensor, num_sums: int, plan: DecodePlan
    ) -> int:
        """Returns how many partial sums of squares the layer left for the next linear."""
        s, b, tiles = self._shape, self._buffers, plan.gemv
        assert tiles is not None
        if isinstance(layer.qkv, PackedMatrix):
            return self._packed_gemv_layer(index, layer, next_norm, num_sums, plan, tiles)

        def residual(x: torch.Tensor, w: torch.Tensor, norm: torch.Tensor, k: int, tile: GemvTile) -> int:
            programs = s.hidden // tile.columns
            residual_gemv_kernel[(programs,)](
                x, w, b.residual, norm, b.normed, b.sums, K=k, COLUMNS=tile.columns, DEPTH=tile.depth,
                **_launch(plan, tile.warps),
            )  # fmt: skip
            return programs

        tile = tiles.qkv
        normed_gemv_kernel[(s.qkv_columns // tile.columns,)](
            b.normed, b.sums, layer.qkv, b.partials, num_sums, s.norm_eps, K=s.hidden, COLUMNS=tile.columns,
            DEPTH=tile.depth, MAX_SUMS=b.max_sums, EARLY=tile.early, **_launch(plan, tile.warps),
        )  # fmt: skip
        self._attend(index, layer, b.partials, 1, 1, plan)
        num_sums = residual(b.attended, layer.output, layer.mlp_norm, s.query_columns, tiles.o)
        tile = tiles.gate_up
        normed_gate_up_gemv_kernel[(s.ffn // tile.columns,)](
            b.normed, b.sums, layer.gate_up, b.active, num_sums, s.norm_eps, N=s.ffn, K=s.hidden, COLUMNS=tile.columns,
            DEPTH=tile.depth, MAX_SUMS=b.max_sums, EARLY=tile.early, **_launch(plan, tile.warps),
        )  # fmt: skip
        return residual(b.active, layer.down, next_norm, s.ffn, tiles.down)

    def _packed_gemv_layer(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        num_sums: int,
        plan: DecodePlan,
        tiles: GemvTiles,
    ) -> int:
        s, b = self._shape, self._buffers
        qkv, output, gate_up, down = packed_matrices(layer)

        def residual(x: torch.Tensor, matrix: PackedMatrix, norm: torch.Tensor, tile: GemvTile) -> int:
            return residual_gemv(x, matrix, b.residual, norm, b.normed, b.sums, tile, _launch(plan, tile.warps))

        normed_gemv(b.normed, b.sums, num_sums, s.norm_eps, qkv, b.partials, tiles.qkv, _launch(plan, tiles.qkv.warps))
        self._attend(index, layer, b.partials, 1, 1, plan)
        num_sums = residual(b.attended, output, layer.mlp_norm, tiles.o)
        launch = _launch(plan, tiles.gate_up.warps)
        gate_up_gemv(b.normed, b.sums, num_sums, s.norm_eps, gate_up, b.active, tiles.gate_up, launch)
        return residual(b.active, down, next_norm, tiles.down)

    def _split_layer(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        width: int,
        plan: DecodePlan,
        beside: Beside | None,
    ) -> None:
        s, b, tiles = self._shape, self._buffers, plan.linear
        assert tiles is not None

        def split(site: Site, x: torch.Tensor, w: torch.Tensor, n: int, k: int, tile: LinearTile) -> None:
            launch = _launch(plan, tile.warps, tile.stages)
            if isinstance(w, PackedMatrix):
                split_product(x, w, b.partials, width, b.padded_rows * n, tile, launch)
            else:
                split_linear_kernel[(n // tile.columns, tile.splits, _tiles(width, tile.rows))](
                    x, w, b.partials, width, b.padded_rows * n, N=n, K=k, SPLITS=tile.splits, ROWS=tile.rows,
                    COLUMNS=tile.columns, DEPTH=tile.depth, SWAP=tile.swap, EARLY=tile.early, **launch,
                )  # fmt: skip
            if beside is not None:  # a term of the sum
                beside.add(index, site, x[:width], b.partials[: width * n].view(width, n))

        split(Site.QKV, b.normed, layer.qkv, s.qkv_columns, s.hidden, tiles.qkv)
        self._attend(index, layer, b.partials, tiles.qkv.splits, width, plan)
        split(Site.OUTPUT, b.attended, layer.output, s.hidden, s.query_columns, tiles.o)
        self._add_norm(b.partials, tiles.o.splits, layer.output_bias, layer.mlp_norm, width, plan)
        tile = tiles.gate_up
        if plan.whole_gate_up:
            split(Site.GATE_UP, b.normed, layer.gate_up, 2 * s.ffn, s.hidden, tile)
            self._silu(b.partials, None, width, plan)
        elif isinstance(layer.gate_up, PackedMatrix):
            launch = _launch(plan, tile.warps, tile.stages)
            gate_up_product(b.normed, layer.gate_up, b.active, width, tile, launch)
        else:
            gate_up_kernel[(s.ffn // tile.columns, _tiles(width, tile.rows))](
                b.normed, layer.gate_up, b.active, width, N=s.ffn, K=s.hidden, ROWS=tile.rows, COLUMNS=tile.columns,
                DEPTH=tile.depth, SWAP=tile.swap, EARLY=tile.early, **_launch(plan, tile.warps, tile.stages),
            )  # fmt: skip
        split(Site.DOWN, b.active, layer.down, s.hidden, s.ffn, tiles.down)
        self._add_norm(b.partials, tiles.down.splits, layer.down_bias, next_norm, width, plan)

    def _library_layer(
        self,
        index: int,
        layer: LayerWeights,
        next_norm: torch.Tensor,
        width: int,
        plan: DecodePlan,
        beside: Beside | None,
    ) -> None:
        b = self._buffers

        def add(site: Site, x: torch.Tensor, product: torch.Tensor) -> None:
            if beside is not None:
                beside.add(index, site, x[:width], product[:width])

        torch.mm(b.normed[:width], values_of(layer.qkv).t(), out=b.qkv[:width])
        add(Site.QKV, b.normed, b.qkv)
        self._attend(index, layer, b.qkv, 1, width, plan)
        torch.mm(b.attended[:width], values_of(layer.output).t(), out=b.projected[:width])
        add(Site.OUTPUT, b.attended, b.projected)
        self._add_norm(b.projected, 1, layer.output_bias, layer.mlp_norm, width, plan)
        torch.mm(b.normed[:width], values_of(layer.gate_up).t(), out=b.gate_up[:width])
        add(Site.GATE_UP, b.normed, b.gate_up)
        self._silu(b.gate_up, layer.gate_up_bias, width, plan)
        torch.mm(b.active[:width], values_of(layer.down).t(), out=b.projected[:width])
        add(Site.DOWN, b.active, b.projected)
        self._add_norm(b.projected, 1, layer.down_bias, next_norm, width, plan)

    def _silu(self, gate_up: torch.Tensor, bias: torch.Tensor | None, width: int, plan: DecodePlan) -> None:
        ffn = self._shape.ffn
        silu_kernel[(-(-ffn // 1024), width)](
            gate_up, gate_up if bias is None else bias, self._buffers.active, FFN=ffn, BLOCK=1024,
            HAS_BIAS=bias is not None, **_launch(plan, 4),
        )  # fmt: skip

    def _add_norm(
        self,
        partials: torch.Tensor,
        splits: int,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        width: int,
        plan: DecodePlan,
    ) -> None:
        s, b = self._shape, self._buffers
        add_norm_kernel[(width,)](
            partials, b.padded_rows * s.hidden, norm if bias is None else bias, b.residual, norm, b.normed, s.norm_eps,
            HIDDEN=s.hidden, BLOCK=next_power_of_2(s.hidden), SPLITS=splits, HAS_BIAS=bias is not None,
            **_launch(plan, 8 if s.hidden > 1024 else 4),
        )  # fmt: skip

    def _head(self, width: int, plan: DecodePlan, num_sums: int, *, store_logits: bool) -> None:
        """Logits, and each program's best token of each row (not those of a sampled step of the library chain)."""
        s, b, head = self._shape, self._buffers, self._weights.head
        programs = head_programs(s, plan)
        if plan.gemv is not None:
            tile = plan.gemv.head
            head_gemv_kernel[(programs,)](
                b.normed, b.sums, head, b.logits, b.best, b.best_id, num_sums, s.norm_eps, N=s.vocab_size, K=s.hidden,
                COLUMNS=tile.columns, DEPTH=tile.depth, MAX_SUMS=b.max_sums, STORE_LOGITS=store_logits,
                **_launch(plan, tile.warps),
            )  # fmt: skip
        elif plan.linear is not None:
            wide = plan.linear.head
            head_kernel[(programs, _tiles(width, wide.rows))](
                b.normed, head, b.logits, b.best, b.best_id, width, programs, N=s.vocab_size, K=s.hidden,
                ROWS=wide.rows, COLUMNS=wide.columns, DEPTH=wide.depth, SWAP=wide.swap, STORE_LOGITS=store_logits,
                **_launch(plan, wide.warps, wide.stages),
            )  # fmt: skip
        else:
            torch.mm(b.normed[:width], head.t(), out=b.logits[:width])
            if not store_logits:
                arg_max_kernel[(programs, width)](
                    b.logits, b.best, b.best_id, programs, VOCAB=s.vocab_size, BLOCK=ARG_MAX_BLOCK, **_launch(plan, 4)
                )

    def _finish(self, width: int, plan: DecodePlan, sampler: Sampler | None) -> None:
        s, b, state = self._shape, self._buffers, self._state
        if sampler is None:
            pick_kernel[(width,)](
                b.best, b.best_id, head_programs(s, plan), state.row_slots, state.last_token, state.length,
                state.scratch_slot, state.out_tokens, state.bad_rows, VOCAB=s.vocab_size, BLOCK=1024,
                **_launch(plan, 4),
            )  # fmt: skip
            return
        sampler(b.logits[:width], state.row_slots[:width], state)
        advance_kernel[(width,)](
            state.row_slots, state.out_tokens, state.last_token, state.length, state.scratch_slot,
            PDL=False, num_warps=1,
        )  # fmt: skip


def _tiles(width: int, rows: int) -> int:
    return math.ceil(width / rows)


def _launch(plan: DecodePlan, warps: int, stages: int = 2) -> dict[str, Any]:
    options: dict[str, Any] = {"PDL": plan.dependent_launch, "num_warps": warps, "num_stages": stages}
    if plan.dependent_launch:
        options["launch_pdl"] = True
    return options

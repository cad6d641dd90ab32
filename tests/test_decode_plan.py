"""What runs at a decode width: pure integers, so that every model and width can be tried without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_plan import Chain, DecodePlan, adapted, plan_decode
from worker.cuda.decode_shape import DecodeShape

BF16 = torch.bfloat16
LLAMA_8B = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=128256, context=8192, norm_eps=1e-5,
    dtype=BF16, windows=(None,) * 32,
)  # fmt: skip
QWEN3_06B = DecodeShape(
    hidden=1024, num_heads=16, num_kv_heads=8, head_dim=128, ffn=3072, vocab_size=151936, context=8192, norm_eps=1e-6,
    dtype=BF16, windows=(None,) * 28, qk_norm=True,
)  # fmt: skip
SMOLLM2 = DecodeShape(
    hidden=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn=1536, vocab_size=49152, context=8192, norm_eps=1e-5,
    dtype=BF16, windows=(None,) * 30,
)  # fmt: skip
ODD = DecodeShape(
    hidden=200, num_heads=6, num_kv_heads=1, head_dim=96, ffn=300, vocab_size=1003, context=256, norm_eps=1e-5,
    dtype=BF16, windows=(None,) * 2,
)  # fmt: skip
QWEN25_05B = DecodeShape(
    hidden=896, num_heads=14, num_kv_heads=2, head_dim=64, ffn=4864, vocab_size=151936, context=8192, norm_eps=1e-6,
    dtype=BF16, windows=(None,) * 24, qkv_bias=True,
)  # fmt: skip
PACKED = {
    f"{name} {bits}": replace(shape, quantization=bits)
    for name, shape in (("llama-8b", LLAMA_8B), ("qwen2.5-0.5b", QWEN25_05B), ("smollm2", SMOLLM2))
    for bits in ("int8", "int4")
}
SHAPES = PACKED | {"llama-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B, "smollm2": SMOLLM2, "odd": ODD}
WIDTHS = (1, 2, 3, 4, 8, 16, 24, 32, 64, 100, 128, 256)
SHARED_MEMORY_BYTES = 227 * 1024


@pytest.mark.parametrize(("name", "width"), list(itertools.product(SHAPES, WIDTHS)))
def test_steps_with_adapters_have_whole_products_and_the_same_attention(name: str, width: int) -> None:
    plan = plan_decode(SHAPES[name], width, hopper=True)
    beside = adapted(plan, SHAPES[name])
    assert beside.chain is (Chain.LIBRARY if plan.chain is Chain.LIBRARY else Chain.SPLIT_K)
    assert beside.whole_gate_up == (beside.chain is Chain.SPLIT_K)
    assert beside.linear is None or beside.linear.gate_up.splits == 1, "SiLU reads one sum"
    assert beside.attention == plan.attention
    buffers = DecodeBuffers(SHAPES[name], width, [plan, beside], torch.device("meta"))
    buffers.fits(SHAPES[name], width, plan)
    buffers.fits(SHAPES[name], width, beside)


@pytest.mark.parametrize(("name", "width"), list(itertools.product(SHAPES, WIDTHS)))
def test_tiles_divide_every_matrix_and_fit_shared_memory(name: str, width: int) -> None:
    shape = SHAPES[name]
    plan = plan_decode(shape, width, hopper=True)
    matrices = {
        "qkv": (shape.qkv_columns, shape.hidden),
        "o": (shape.hidden, shape.query_columns),
        "gate_up": (shape.ffn, shape.hidden),
        "down": (shape.hidden, shape.ffn),
    }
    for linear, (n, k) in matrices.items():
        if plan.gemv is not None:
            tile = getattr(plan.gemv, linear)
            assert n % tile.columns == 0
            assert k % tile.depth == 0 or shape.bits is not None, "packed ones have zeros behind K"
        if plan.linear is not None:
            tile = getattr(plan.linear, linear)
            assert n % tile.columns == 0
            assert k % (tile.splits * tile.depth) == 0
            assert shape.bits is None or tile.rows <= 64
            tiles = tile.columns * (2 if linear == "gate_up" else 1) + tile.rows
            assert tiles * tile.depth * tile.stages * 2 <= SHARED_MEMORY_BYTES
    if plan.linear is not None:
        assert plan.linear.gate_up.splits == plan.linear.head.splits == 1
        assert shape.hidden % plan.linear.head.depth == 0


@pytest.mark.parametrize("name", PACKED)
def test_packed_matrices_of_real_models_have_tiles_at_every_width(name: str) -> None:
    chains = [plan_decode(PACKED[name], width, hopper=True).chain for width in range(1, 257)]
    assert chains == [Chain.GEMV] + [Chain.SPLIT_K] * 255


def test_real_models_run_the_fast_chains_where_they_won() -> None:
    def chains(shape: DecodeShape) -> list[Chain]:
        return [plan_decode(shape, width, hopper=True).chain for width in (1, 2, 64, 128, 256)]

    assert chains(LLAMA_8B) == [Chain.GEMV, Chain.SPLIT_K, Chain.SPLIT_K, Chain.LIBRARY, Chain.LIBRARY]
    assert chains(QWEN3_06B) == [Chain.GEMV, *[Chain.SPLIT_K] * 4]
    assert chains(SMOLLM2) == [Chain.GEMV, *[Chain.SPLIT_K] * 4]


@pytest.mark.parametrize("width", WIDTHS)
def test_what_the_fast_chains_cannot_do_runs_on_the_library(width: int) -> None:
    for shape in (
        ODD,
        replace(LLAMA_8B, dtype=torch.float16),
        replace(LLAMA_8B, dtype=torch.float32),
        replace(LLAMA_8B, mlp_bias=True),
        replace(LLAMA_8B, vocab_size=2**31 // 4096),
    ):
        assert plan_decode(shape, width, hopper=True).chain is Chain.LIBRARY
    assert plan_decode(LLAMA_8B, width, hopper=False).chain is Chain.LIBRARY


def test_a_long_down_is_cut_for_steps_whose_tiles_leave_multiprocessors_idle() -> None:
    def parts(shape: DecodeShape, *widths: int) -> list[int]:
        return [plan_decode(shape, width, hopper=True).down_parts for width in widths]

    assert parts(LLAMA_8B, 64, 65, 256, 257) == [1, 2, 2, 1]
    assert parts(replace(LLAMA_8B, dtype=torch.float16), 64, 128) == [1, 2]
    for shape in (
        replace(LLAMA_8B, dtype=torch.float32),
        replace(LLAMA_8B, quantization="fp8"),
        replace(LLAMA_8B, ffn=4096),
        replace(LLAMA_8B, ffn=8200),  # the second part would not start at a multiple of 16 bytes
        QWEN3_06B,
    ):
        assert parts(shape, 128) == [1]


def test_adapters_find_every_product_whole() -> None:
    assert adapted(plan_decode(LLAMA_8B, 128, hopper=True), LLAMA_8B).down_parts == 1


@pytest.mark.parametrize("name", SHAPES)
def test_attention_of_many_rows_goes_by_pieces_and_leaves_short_rows_whole(name: str) -> None:
    """With a fixed number of programs a row the longest row would set the end; a short one is not worth a sum."""
    for width in range(1, 257):
        tile = plan_decode(SHAPES[name], width, hopper=True).attention
        assert (tile.pieces is not None) == (width > 16)
        if tile.pieces is not None:
            assert tile.share >= 256
            assert width < tile.programs(width) <= width + 256


def test_buffers_refuse_a_plan_that_they_were_not_made_for() -> None:
    device = torch.device("meta")
    plans = [plan_decode(QWEN3_06B, width, hopper=True) for width in (1, 8)]
    buffers = DecodeBuffers(QWEN3_06B, 8, plans, device)
    for plan in plans:
        buffers.fits(QWEN3_06B, plan.width, plan)
    with pytest.raises(AssertionError):
        buffers.fits(QWEN3_06B, 2, plans[0])
    wide = plan_decode(QWEN3_06B, 256, hopper=True)
    with pytest.raises(AssertionError):
        buffers.fits(QWEN3_06B, 256, wide)
    library = DecodePlan(8, Chain.LIBRARY, wide.attention)
    with pytest.raises(AssertionError):
        DecodeBuffers(QWEN3_06B, 8, [library], device).fits(QWEN3_06B, 1, plans[0])
    with pytest.raises(AssertionError):
        DecodeBuffers(QWEN3_06B, 8, [library], device).fits(QWEN3_06B, 8, replace(library, down_parts=2))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 8, 12, 32])
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_06B])
def test_a_lone_rows_attention_is_on_the_device_all_at_once(shape: DecodeShape, num_kv_heads: int) -> None:
    tile = plan_decode(replace(shape, num_kv_heads=num_kv_heads), 1, hopper=True).attention
    assert tile.splits.bit_count() == 1
    assert tile.splits * num_kv_heads <= 256


@pytest.mark.parametrize(("name", "width"), list(itertools.product(SHAPES, WIDTHS)))
def test_only_steps_whose_kernels_overlap_load_cells_before_they_wait(name: str, width: int) -> None:
    plan = plan_decode(SHAPES[name], width, hopper=True)
    assert plan.attention.first == (plan.chain is not Chain.LIBRARY and plan.attention.splits > 1)
    assert plan.dependent_launch
    assert not plan_decode(SHAPES[name], width, hopper=False).attention.first
    assert plan.attention.pieces is None or not plan.early_qkv, "the list would have to be waited for"

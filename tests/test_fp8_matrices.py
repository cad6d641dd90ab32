"""Matrices and rows of fp8: what they stand for, what linear makes of them, and how their products are cut."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from planner.errors import InvalidConfiguration
from tests.decode_reference import random_weights
from worker.cuda.decode_buffers import DecodeBuffers
from worker.cuda.decode_plan import Chain, adapted, plan_decode
from worker.cuda.decode_shape import DecodeShape
from worker.cuda.fp8 import E4M3, Fp8Matrix, check_fp8_matrix, fp8_matrix, fp8_rows, fp8_weights
from worker.cuda.tiles import LinearTile

LLAMA_8B = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14_336, vocab_size=128_256, context=8192,
    norm_eps=1e-5, dtype=torch.bfloat16, windows=(None,) * 32, quantization="fp8",
)  # fmt: skip
QWEN3_06B = replace(LLAMA_8B, hidden=1024, num_heads=16, ffn=3072, vocab_size=151_936, qk_norm=True)
SMALL = replace(LLAMA_8B, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn=96, vocab_size=50, windows=(None,))
SHARED_MEMORY_BYTES = 227 * 1024


def matrix(rows: int = 48, columns: int = 128, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def test_a_rows_largest_number_is_exact_and_others_are_off_by_a_sixteenth_of_themselves() -> None:
    x = matrix() * torch.logspace(-10, 20, 48)[:, None]
    codes, scales = fp8_rows(x)
    found = codes.float() * scales[:, None]
    largest = x.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0)
    least = scales[:, None] * 2.0**-9  # what separates the smallest codes
    assert ((found - x).abs() <= torch.maximum(x.abs() / 16, least / 2) * 1.0001).all()


def test_a_row_of_nothing_stays_nothing_and_what_is_no_number_takes_its_row_alone() -> None:
    x = matrix()
    x[3], x[5, 7], x[9, 0] = 0, torch.nan, torch.inf
    product = functional.linear(x, fp8_matrix(matrix(seed=1)))
    assert (product[3] == 0).all()
    assert not product[[5, 9]].isfinite().any()
    others = [row for row in range(48) if row not in (5, 9)]
    assert product[others].isfinite().all()


def test_linear_rounds_both_sides_and_nothing_else_is_possible() -> None:
    w, x, bias = matrix(seed=1), matrix(3, 128, seed=2), torch.randn(48)
    rounded = fp8_matrix(w)
    both = [codes.double() * scales[:, None] for codes, scales in (fp8_rows(x), fp8_rows(w))]
    found = functional.linear(x, rounded, bias)
    torch.testing.assert_close(found, (both[0] @ both[1].t() + bias).float())
    one_side = x @ (rounded.codes.float() * rounded.scales[:, None]).t() + bias
    assert (found - one_side).norm() / one_side.norm() > 0.01, "x was not rounded"
    with pytest.raises(TypeError, match="Fp8Matrix has linear alone"):
        torch.neg(rounded)


def test_the_vendors_product_by_rows_is_the_same_arithmetic() -> None:
    codes, scales = fp8_rows(matrix(32, 128, seed=3))
    rounded = fp8_matrix(matrix().bfloat16())
    vendors = torch._scaled_mm(
        codes, rounded.codes.t(), scale_a=scales[:, None], scale_b=rounded.scales[None, :], out_dtype=torch.bfloat16
    )
    ours = functional.linear(codes.float() * scales[:, None], rounded)
    torch.testing.assert_close(vendors.float(), ours.float(), rtol=2**-7, atol=1e-2)


def test_a_decoder_keeps_its_ends_and_counts_its_bytes() -> None:
    plain = random_weights(SMALL, torch.device("cpu"), 0)
    rounded = fp8_weights(plain)
    assert rounded.embedding is plain.embedding
    assert rounded.head is plain.head
    assert (rounded.quantization, plain.quantization) == ("fp8", "none")
    down = rounded.layers[0].down
    assert isinstance(down, Fp8Matrix)
    assert (down.codes.dtype, down.scales.dtype, down.dtype) == (E4M3, torch.float32, torch.bfloat16)
    matrices = [getattr(plain.layers[0], name) for name in ("qkv", "output", "gate_up", "down")]
    assert plain.bytes_read - rounded.bytes_read == sum(each.numel() - 4 * len(each) for each in matrices)


def test_what_has_no_such_products_is_refused_with_the_numbers() -> None:
    odd = random_weights(replace(SMALL, ffn=90), torch.device("cpu"), 0)
    with pytest.raises(
        InvalidConfiguration, match="multiple of 16 columns and rows; gate_up has 64 and 180"
    ) as refusal:
        check_fp8_matrix("gate_up", odd.layers[0].gate_up)
    assert refusal.value.param == "quantization"
    with pytest.raises(InvalidConfiguration, match=r"compute capability 8\.9"):
        check_fp8_matrix("down", random_weights(SMALL, torch.device("cpu"), 0).layers[0].down)


def test_rows_that_are_rounded_apart_are_as_rows_rounded_together() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(33, 64).bfloat16()
    whole, apart = fp8_matrix(matrix), fp8_matrix(matrix, numbers_at_once=5 * 64)
    assert torch.equal(whole.codes.view(torch.uint8), apart.codes.view(torch.uint8))
    assert torch.equal(whole.scales, apart.scales)


@pytest.mark.parametrize(("shape", "width"), list(itertools.product([LLAMA_8B, QWEN3_06B], [1, 2, 8, 16, 24, 48, 64])))
def test_tiles_divide_every_matrix_fit_shared_memory_and_leave_room_for_the_sums(
    shape: DecodeShape, width: int
) -> None:
    plan = plan_decode(shape, width, hopper=True)
    beside = adapted(plan, shape)
    buffers = DecodeBuffers(shape, width, [plan, beside], torch.device("meta"))
    for each in (plan, beside):
        buffers.fits(shape, width, each)
        tiles = each.linear
        assert tiles is not None
        for tile, n, k, matrices in (
            (tiles.qkv, shape.qkv_columns, shape.hidden, 1),
            (tiles.o, shape.hidden, shape.query_columns, 1),
            (tiles.gate_up, shape.ffn, shape.hidden, 2),
            (tiles.down, shape.hidden, shape.ffn, 1),
        ):
            assert tile.divides(n, k)
            assert not replace(tile, columns=tile.columns * 3).divides(n, k) or n % (tile.columns * 3) == 0
            assert (tile.columns * matrices + tile.rows) * tile.depth * tile.stages <= SHARED_MEMORY_BYTES
        assert tiles.gate_up.splits == tiles.head.splits == 1
    for columns in (shape.hidden, shape.query_columns, shape.ffn):
        assert buffers.codes.of(columns).shape == (128, columns)


def test_no_program_asks_for_more_than_it_reads() -> None:
    tile = LinearTile(16, 64, 128, splits=4, stages=4, warps=4, swap=True, ahead=1024)
    asked = {depth: tile.ahead_of(depth) for depth in (512, 1024, 3072, 4096, 14_336)}
    assert asked == {512: 128, 1024: 256, 3072: 512, 4096: 1024, 14_336: 1024}
    assert tile.ahead_of(256) == 0
    assert [replace(tile, ahead=128).ahead_of(4096, bits) for bits in (8, 4)] == [128, 0], "four bits: half a line"
    assert replace(tile, ahead=0).ahead_of(4096) == 0
    with pytest.raises(AssertionError, match="power of two"):
        replace(tile, ahead=384)


def test_a_large_model_runs_its_own_kernels_up_to_64_rows() -> None:
    chains = {width: plan_decode(LLAMA_8B, width, hopper=True).chain for width in (1, 2, 64, 128)}
    assert chains == {1: Chain.SPLIT_K, 2: Chain.SPLIT_K, 64: Chain.SPLIT_K, 128: Chain.LIBRARY}
    assert plan_decode(QWEN3_06B, 256, hopper=True).chain is Chain.SPLIT_K
    assert plan_decode(SMALL, 8, hopper=True).chain is Chain.LIBRARY, "its 96 columns have no tile"

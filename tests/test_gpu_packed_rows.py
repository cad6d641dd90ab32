"""Products with packed matrices by any number of rows, against the values that the matrices stand for.

Runs on a GPU, or in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_gpu_packed_rows.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton", reason="triton is not installed")

from tests.cuda_rig import DEVICE, INTERPRETED
from worker.cuda.packed import PackedMatrix, pack_int4, pack_int8
from worker.cuda.packed_products import (
    gate_up_gemv,
    gate_up_product,
    head_gemv,
    head_product,
    normed_gemv,
    residual_gemv,
)
from worker.cuda.packed_rows import product_of_rows
from worker.cuda.packed_tiles import gate_up_gemv_tile, gate_up_tile, gemv_tile, head_tile, product_tile
from worker.cuda.tiles import GemvTile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA device"),
]
# The interpreter multiplies bfloat16 matrices wrongly.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
MOST_ERROR = 1e-6 if INTERPRETED else 1e-2
Pack = Callable[[Tensor], PackedMatrix]


def error(num_rows: int, num_columns: int, depth: int, pack: Pack) -> float:
    torch.manual_seed(num_rows)
    matrix = pack(torch.randn(num_columns, depth, device=DEVICE).to(DTYPE))
    # Rows that lie apart, as slices of something wider do.
    x = torch.randn(num_rows, depth + 32, device=DEVICE).to(DTYPE)[:, :depth]
    found, expected = product_of_rows(x, matrix), functional.linear(x.double(), matrix.values().double())
    assert found.dtype == DTYPE
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
@pytest.mark.parametrize("num_rows", [1, 5, 16, 17, 33, 64, 65, 130, 257])
def test_any_number_of_rows_is_multiplied_with_the_values(num_rows: int, pack: Pack) -> None:
    """In several steps of K, on a GPU: where one step gives the right sums, several may not."""
    assert error(num_rows, 128, 512, pack) < MOST_ERROR
    if not INTERPRETED:
        assert error(num_rows, 4096, 4096, pack) < MOST_ERROR


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
@pytest.mark.parametrize("num_rows", [5, 20, 64, 200])
@pytest.mark.parametrize(("num_columns", "depth"), [(192, 192)] if INTERPRETED else [(4160, 4096), (4096, 4032)])
def test_sizes_that_only_narrow_tiles_or_short_steps_divide(
    num_columns: int, depth: int, num_rows: int, pack: Pack
) -> None:
    """64 columns, where four bits take steps of 256; and steps of 64."""
    tile = product_tile(4 if pack is pack_int4 else 8, num_rows, num_columns, depth)
    assert tile is not None
    assert tile.columns == 64 or tile.depth == 64
    assert error(num_rows, num_columns, depth, pack) < MOST_ERROR


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
@pytest.mark.parametrize("num_rows", [2, 17, 33, 200])
@pytest.mark.parametrize(("ffn", "depth"), [(96, 192)] if INTERPRETED else [(2048, 4096), (2080, 4096), (1536, 576)])
def test_gate_and_up_of_several_rows_in_several_steps(ffn: int, depth: int, num_rows: int, pack: Pack) -> None:
    """Rows of padding are read, and none of them is written."""
    torch.manual_seed(num_rows)
    matrix = pack(torch.randn(2 * ffn, depth, device=DEVICE).to(DTYPE))
    tile = gate_up_tile(matrix.bits, num_rows, ffn, depth)
    assert tile is not None
    assert depth > tile.depth
    x, out = torch.randn(256, depth, device=DEVICE).to(DTYPE), torch.full((256, ffn), 7.0, device=DEVICE, dtype=DTYPE)
    launch = {"PDL": False, "num_warps": tile.warps, "num_stages": tile.stages}
    gate_up_product(x, matrix, out, num_rows, tile, launch)
    gate, up = (x[:num_rows].double() @ matrix.values().double().t()).split(ffn, dim=1)
    expected = functional.silu(gate) * up
    assert float((out[:num_rows].double() - expected).norm() / expected.norm()) < MOST_ERROR
    assert bool((out[num_rows:] == 7).all())


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_shapes_that_the_kernel_does_not_take_are_multiplied_alike(pack: Pack) -> None:
    for num_columns, depth in ((96, 512), (128, 96)):
        assert product_tile(4, 3, num_columns, depth) is None
        assert error(3, num_columns, depth, pack) < MOST_ERROR


def lone_product(x: Tensor, matrix: PackedMatrix, tile: GemvTile) -> Tensor:
    """float32 [N], by the kernel that adds to the residual, which is none here."""
    residual, norm, scaled = (torch.zeros(len(matrix), dtype=torch.float32, device=DEVICE) for _ in range(3))
    sums = torch.zeros(len(matrix) // tile.columns, dtype=torch.float32, device=DEVICE)
    residual_gemv(x, matrix, residual, norm, scaled, sums, tile, {"PDL": False, "num_warps": tile.warps})
    return residual


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_no_rows_are_multiplied_to_no_rows(pack: Pack) -> None:
    matrix = pack(torch.randn(64, 96, device=DEVICE).to(DTYPE))
    found = product_of_rows(torch.empty(0, 96, dtype=DTYPE, device=DEVICE), matrix)
    assert (found.shape, found.dtype, found.device.type) == ((0, 64), DTYPE, DEVICE.type)


def exact_values(matrix: PackedMatrix) -> Tensor:
    """float64, not rounded to the type that the matrix stands for, as the kernels of one row do not round them."""
    return PackedMatrix(matrix.bits, matrix.codes, matrix.scales, torch.float32).values().double()


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
@pytest.mark.parametrize(("depth", "warps"), [(512, 1), (1280, 1), (640, 2)])
def test_a_lone_row_is_multiplied_with_the_values_whatever_the_tile(depth: int, warps: int, pack: Pack) -> None:
    torch.manual_seed(depth)
    matrix = pack(torch.randn(16, depth, device=DEVICE).to(DTYPE))
    x = torch.randn(depth, device=DEVICE).to(DTYPE)
    found = lone_product(x, matrix, GemvTile(8, warps * 32 * 128 // matrix.bits, warps))
    expected = exact_values(matrix) @ x.double()
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-4  # x as integers of 16 bits


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
@pytest.mark.parametrize("depth", [512, 1280])
def test_a_program_of_several_eights_of_columns_gives_what_one_of_each_does(depth: int, pack: Pack) -> None:
    torch.manual_seed(depth)
    matrix = pack(torch.randn(64, depth, device=DEVICE).to(DTYPE))
    x = torch.randn(depth, device=DEVICE).to(DTYPE)
    squares = (x.float() ** 2).sum().view(1)
    normed = x.double() / (squares.double() / depth).sqrt()
    whole = exact_values(matrix) @ normed
    gate, up = whole.split(32)
    outs = torch.empty(2, 64, dtype=torch.float32, device=DEVICE)
    both = torch.empty(2, 32, dtype=torch.float32, device=DEVICE)
    for out, active, eights in zip(outs, both, (1, 4), strict=True):
        tile, launch = GemvTile(8 * eights, 128 * 32 // matrix.bits, 1), {"PDL": False, "num_warps": 1}
        normed_gemv(x, squares, 1, 0.0, matrix, out, tile, launch)
        gate_up_gemv(x, squares, 1, 0.0, matrix, active, replace(tile, columns=4 * eights), launch)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(both[0], both[1])
    assert float((outs[1].double() - whole).norm() / whole.norm()) < 1e-3
    assert float((both[1].double() - functional.silu(gate) * up).norm() / up.norm()) < 1e-3


@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
@pytest.mark.parametrize(("columns", "depth"), [(16, 2624)] if INTERPRETED else [(4096, 14_336), (5120, 5120)])
def test_a_lone_row_in_the_tiles_that_models_of_such_sizes_run(columns: int, depth: int, pack: Pack) -> None:
    """In several steps of K, the last of which may reach beyond it."""
    torch.manual_seed(depth)
    matrix, x = pack(torch.randn(columns, depth, device=DEVICE).to(DTYPE)), torch.randn(depth, device=DEVICE).to(DTYPE)
    tile, both = gemv_tile(matrix.bits, columns, depth), gate_up_gemv_tile(matrix.bits, columns // 2, depth)
    assert tile is not None
    assert both is not None
    whole = matrix.values().double() @ x.double()
    added = lone_product(x, matrix, tile)
    squares = torch.tensor([float(depth)], device=DEVICE)  # whose norm changes nothing
    normed, active = (torch.empty(size, dtype=torch.float32, device=DEVICE) for size in (columns, columns // 2))
    normed_gemv(x, squares, 1, 0.0, matrix, normed, tile, {"PDL": False, "num_warps": tile.warps})
    gate_up_gemv(x, squares, 1, 0.0, matrix, active, both, {"PDL": False, "num_warps": both.warps})
    gate, up = whole.split(columns // 2)
    for found, expected in ((added, whole), (normed, whole), (active, functional.silu(gate) * up)):
        assert float((found.double() - expected).norm() / expected.norm()) < (1e-3 if INTERPRETED else 1e-2)


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("pack", [pack_int8, pack_int4])
def test_what_is_no_number_shows_in_every_product_of_a_lone_row(pack: Pack, fault: float) -> None:
    torch.manual_seed(0)
    matrix, x = pack(torch.randn(16, 1024, device=DEVICE).to(DTYPE)), torch.randn(1024, device=DEVICE).to(DTYPE)
    tile = GemvTile(8, 2048, 2)
    assert lone_product(x, matrix, tile).isfinite().all()
    x[700] = fault
    assert not lone_product(x, matrix, tile).isfinite().any()


@pytest.mark.parametrize("num_rows", [1, 5, 70])
@pytest.mark.parametrize("store_logits", [True, False])
@pytest.mark.parametrize("depth", [192] if INTERPRETED else [192, 4096])
def test_a_head_gives_logits_and_each_programs_best_token(depth: int, num_rows: int, store_logits: bool) -> None:
    """Of 203 tokens, which fill no whole program, two are alike: the lower one counts."""
    torch.manual_seed(num_rows)
    values = torch.randn(203, depth, device=DEVICE).to(DTYPE)
    values[150] = values[60]
    head, x = pack_int8(values), torch.randn(128, depth, device=DEVICE).to(DTYPE)
    x[0] = values[60]
    sums, logits = torch.full((1,), float(depth), device=DEVICE), torch.zeros(num_rows, 203, dtype=DTYPE, device=DEVICE)
    tile = head_tile(num_rows, *values.shape)
    assert tile is not None
    programs = -(-203 // (8 if num_rows == 1 else tile.columns))
    best = torch.zeros(num_rows, programs, device=DEVICE)
    best_id = torch.zeros(num_rows, programs, dtype=torch.int32, device=DEVICE)
    launch = {"PDL": False, "num_warps": 1 if num_rows == 1 else tile.warps, "num_stages": tile.stages}
    if num_rows == 1:
        lone = GemvTile(8, 512, 1)
        head_gemv(x[0], sums, 1, 0.0, head, logits, best, best_id, lone, launch, store_logits=store_logits)
    else:
        head_product(x, head, logits, best, best_id, num_rows, tile, launch, store_logits=store_logits)
    expected = x[:num_rows].double() @ head.values().double().t()
    if store_logits:
        assert float((logits.double() - expected).norm() / expected.norm()) < (1e-4 if INTERPRETED else 1e-2)
    else:
        assert not logits.any()
    winners = [int(ids[tops == tops.max()].min()) for tops, ids in zip(best, best_id, strict=True)]
    assert winners[0] == 60
    most = 1e-3 if INTERPRETED else 0.04 * depth**0.5  # steps of numbers that large
    for row, winner in zip(expected, winners, strict=True):
        assert row[winner] >= row.max() - most

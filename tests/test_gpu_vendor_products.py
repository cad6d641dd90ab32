"""Kernels that the vendor's library has for one product: all compute it, and which one is chosen changes nothing."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from tests.decode_reference import random_weights  # noqa: E402
from worker.cuda.cublas_lt import CublasLt, Kernel, Product, ProductShape, Tiling, VendorError  # noqa: E402
from worker.cuda.decode_buffers import DecodeBuffers  # noqa: E402
from worker.cuda.decode_plan import AttentionTile, Chain, DecodePlan  # noqa: E402
from worker.cuda.decode_shape import DecodeShape  # noqa: E402
from worker.cuda.step_products import StepProducts  # noqa: E402
from worker.cuda.vendor_products import VendorProducts, microseconds, offered, vendor_products  # noqa: E402

of_hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="what the library has, and what it names first, is another thing on other generations",
)
ROWS = (65, 96, 128, 144, 192, 250, 256)
MATRICES = {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ONE_LAYER = DecodeShape(
    hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=64, context=64,
    norm_eps=1e-5, dtype=torch.bfloat16, windows=(None,),
)  # fmt: skip


@pytest.fixture(scope="module")
def device() -> torch.device:
    device = torch.device("cuda")
    torch.mm(torch.ones(1, 1, device=device), torch.ones(1, 1, device=device))  # brings the library into the process
    return device


def operands(shape: ProductShape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(shape.rows)
    x = torch.randn(shape.rows, shape.depth, device=device, generator=generator)
    w = torch.randn(shape.columns, shape.depth, device=device, generator=generator) * 0.02
    return x.to(shape.dtype), w.to(shape.dtype)


def exact(shape: ProductShape, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """float32 [parts, rows, columns]."""
    pairs = zip(x.float().chunk(shape.parts, 1), w.float().chunk(shape.parts, 1), strict=True)
    return torch.stack([a @ b.t() for a, b in pairs])


def products(product: Product, x: torch.Tensor, w: torch.Tensor) -> dict[Tiling, torch.Tensor]:
    shape, found = product.shape, {}
    for kernel in offered(product):
        out = torch.full((shape.parts, shape.rows, shape.columns), float("nan"), dtype=shape.out_dtype, device=x.device)
        product.launcher(x, w, out, kernel)()
        found[kernel.tiling] = out
    return found


@of_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize("rows", ROWS)
def test_all_kernels_that_are_tried_give_the_same_numbers_and_the_right_ones(
    device: torch.device, rows: int, matrix: str, dtype: torch.dtype
) -> None:
    shape = ProductShape(rows, *MATRICES[matrix], dtype)
    if matrix == "down":
        shape = replace(shape, parts=2, part_stride=rows * shape.columns)
    x, w = operands(shape, device)
    found = products(CublasLt(device).product(shape), x, w)
    assert len(found) > 8, "more than the heuristic names"
    first, reference = next(iter(found.values())), exact(shape, x, w)
    torch.testing.assert_close(first.float(), reference, rtol=1e-2, atol=1e-2)
    for tiling, out in found.items():
        assert torch.equal(out, first), tiling


def test_parts_lie_as_far_apart_as_asked(device: torch.device) -> None:
    shape = ProductShape(80, 4096, 14336, torch.bfloat16, parts=2, part_stride=128 * 4096)
    x, w = operands(shape, device)
    product = CublasLt(device).product(shape)
    out = torch.full((2, 128, 4096), -7.0, device=device)
    product.launcher(x, w, out, product.suggested()[0])()
    torch.testing.assert_close(out[:, :80], exact(shape, x, w), rtol=1e-3, atol=1e-3)
    assert (out[:, 80:] == -7).all(), "what lies between the parts is not written"


@pytest.mark.parametrize("has_library", [True, False])
def test_a_step_has_its_long_product_in_parts_with_the_library_and_without(
    device: torch.device, has_library: bool
) -> None:
    width, vendor = 96, vendor_products(device) if has_library else None
    plan = DecodePlan(width, Chain.LIBRARY, AttentionTile(1, 64, 4, 3), down_parts=2)
    buffers = DecodeBuffers(ONE_LAYER, width, [plan], device)
    steps, layers = StepProducts(ONE_LAYER, buffers, vendor), random_weights(ONE_LAYER, device).layers
    assert steps.choose(width, plan, layers) == (4 if has_library else 0)
    assert steps.choose(width, plan, layers) == 0, "they were tried before"
    shape, w = ProductShape(width, 4096, 14336, torch.bfloat16, 2, buffers.padded_rows * 4096), layers[0].down
    assert not has_library or (vendor is not None and vendor.takes(shape))
    x, _ = operands(shape, device)
    steps.parts(x, w, width, 2)
    parts = buffers.partials.view(2, buffers.padded_rows, 4096)[:, :width]
    torch.testing.assert_close(parts, exact(shape, x, w), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tiling", [Tiling(65_000, 2, 0), Tiling(18, 2, 1_000), Tiling(18, 60_000, 0)])
def test_a_tiling_that_the_library_does_not_have_is_none(device: torch.device, tiling: Tiling) -> None:
    product = CublasLt(device).product(ProductShape(128, 28672, 4096, torch.bfloat16))
    assert product.variant(product.suggested()[0], tiling) is None


@of_hopper
def test_a_product_whose_depth_the_library_would_cut_is_left_to_it(device: torch.device) -> None:
    shape = ProductShape(96, 1024, 3072, torch.bfloat16)
    assert offered(CublasLt(device).product(shape)) == []
    vendor = VendorProducts(CublasLt(device))
    vendor.choose(shape, [operands(shape, device)[1]])
    assert not vendor.takes(shape)


class RefusesFirst(CublasLt):
    """Does not launch the kernel that its heuristic names first."""

    def product(self, shape: ProductShape) -> Product:
        return FirstRefused(self, self._handle, self._work, shape)


class FirstRefused(Product):
    def launcher(self, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, kernel: Kernel) -> Callable[[], None]:
        if kernel.tiling == self.suggested()[0].tiling:
            raise VendorError("as it was told to")
        return super().launcher(x, w, out, kernel)


@of_hopper
def test_where_the_heuristics_first_does_not_start_there_is_nothing_to_be_alike(device: torch.device) -> None:
    shape = ProductShape(128, 28672, 4096, torch.bfloat16)
    vendor = VendorProducts(RefusesFirst(device))
    vendor.choose(shape, [operands(shape, device)[1]])
    assert not vendor.takes(shape)


def test_matrices_of_any_width_have_kernels_or_are_left(device: torch.device) -> None:
    """Rows of 600 bytes are nothing that the newer kernels load; which of the older ones is faster changes nothing."""
    for shape in (ProductShape(8, 200, 300, torch.float16), ProductShape(8, 1003, 200, torch.float16)):
        x, w = operands(shape, device)
        outs = []
        for _ in range(3):
            vendor = VendorProducts(CublasLt(device))
            vendor.choose(shape, [w])
            if vendor.takes(shape):
                out = torch.empty(shape.rows, shape.columns, dtype=shape.dtype, device=device)
                vendor.run(shape, x, w, out)
                torch.testing.assert_close(out, exact(shape, x, w)[0].to(shape.dtype), rtol=1e-2, atol=1e-2)
                outs.append(out)
        assert len(outs) in (0, 3), "whether it is left is not a matter of time"
        assert all(torch.equal(out, outs[0]) for out in outs)


def test_a_refused_call_is_an_error_that_names_it(device: torch.device) -> None:
    library = CublasLt(device)
    kernel = library.product(ProductShape(128, 4096, 4096, torch.bfloat16)).suggested()[0]
    no_attribute, nothing = 9999, ctypes.c_size_t(0)
    with pytest.raises(VendorError, match="cublasLtMatmulAlgoConfigGetAttribute failed with status"):
        library.call(
            "cublasLtMatmulAlgoConfigGetAttribute", ctypes.byref(kernel.algorithm), no_attribute, None, nothing,
            ctypes.byref(nothing),
        )  # fmt: skip


def test_a_chosen_kernel_is_no_slower_than_the_heuristics_first(device: torch.device) -> None:
    shape = ProductShape(192, 28672, 4096, torch.bfloat16)
    matrices = [operands(shape, device)[1] for _ in range(4)]
    vendor = VendorProducts(CublasLt(device))
    assert not vendor.takes(shape)
    vendor.choose(shape, matrices)
    assert vendor.takes(shape)
    x, out = operands(shape, device)[0], torch.empty(192, 28672, dtype=torch.bfloat16, device=device)
    vendor.run(shape, x, matrices[0], out)
    assert torch.equal(out, x @ matrices[0].t())

    runs = {
        "chosen": [partial(vendor.run, shape, x, w, out) for w in matrices * 4],
        "first": [partial(torch.mm, x, w.t(), out=out) for w in matrices * 4],
    }
    took = microseconds(runs, rounds=5)
    assert took["chosen"] < took["first"] * 1.03

"""What the compiler makes of products with packed matrices, for GPUs of compute capability 9.0.

Needs Triton, and no GPU: pytest tests/test_gpu_packed_compiled.py
"""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tests.cuda_rig import INTERPRETED
from worker.cuda.packed_head import packed_head_kernel
from worker.cuda.packed_linear import packed_gate_up_kernel, packed_split_kernel
from worker.cuda.packed_tiles import gate_up_tile, head_tile, product_tile
from worker.cuda.tiles import LinearTile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="compiles")]

N, K = 4096, 4096
POINTERS = {"x": "*bf16", "codes": "*i32", "out": "*fp32", "logits": "*bf16", "best": "*fp32", "best_id": "*i32"}
NUMBERS = ("num_rows", "num_parts", "split_stride")


def compiled(kernel: Any, tile: LinearTile | None, bits: int) -> str:
    """Its PTX."""
    assert tile is not None
    pointers = POINTERS | {"scales": "*fp32" if bits == 8 else "*i32"}
    values = {
        "N": N, "K": K, "SPLITS": tile.splits, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
        "BITS": bits, "NATIVE": True, "EARLY": False, "AHEAD": 0, "STORE_LOGITS": True, "PDL": True,
    }  # fmt: skip
    signature, constants, aligned = {}, {}, {}
    for place, param in enumerate(kernel.params):
        if param.name in pointers:
            signature[param.name] = pointers[param.name]
            aligned[place,] = [["tt.divisibility", 16]]
        elif param.name in NUMBERS:
            signature[param.name] = "i32"
        else:
            signature[param.name] = "constexpr"
            constants[place,] = values[param.name]
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
    source = ASTSource(kernel, signature, constants, aligned)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.parametrize("num_rows", [16, 32, 64])
@pytest.mark.parametrize("product", ["split, 8", "split, 4", "gate and up, 4", "head, 8"])
def test_weights_in_registers_stay_until_the_tensor_cores_have_read_them(product: str, num_rows: int) -> None:
    """Each step waits for all of its products before the next step's weights are made."""
    bits = int(product[-1])
    if product.startswith("split"):
        ptx = compiled(packed_split_kernel, product_tile(bits, num_rows, N, K), bits)
    elif product.startswith("gate"):
        ptx = compiled(packed_gate_up_kernel, gate_up_tile(bits, num_rows, N, K), bits)
    else:
        ptx = compiled(packed_head_kernel, head_tile(num_rows, N, K), bits)
    assert "wgmma.mma_async" in ptx
    left_running = [int(count) for count in re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", ptx)]
    assert left_running
    assert set(left_running) == {0}

"""What the compiler makes of decode attention that starts early, for GPUs of compute capability 9.0.

Needs Triton, and no GPU: pytest tests/test_gpu_attention_compiled.py
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tests.cuda_rig import INTERPRETED
from worker.cuda.decode_attention import attention_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="compiles")]

FLOATS = ("scale", "eps")
INTEGERS = ("split_stride", "table_stride", "window")
INDICES = ("row_slots", "length", "new_cells", "table", "arrived", "work", "num_pieces")
SINGLE = ("qkv", "cos", "sin", "k_scales", "v_scales", "part_out", "part_max", "part_sum")


def compiled(cells: str) -> str:
    """The assembly of a lone row's attention over such cells, whose first block is loaded before the wait."""
    constants: dict[str, Any] = {
        "HEADS": 32, "KV_HEADS": 8, "D": 128, "D_PADDED": 128, "GROUP_PADDED": 16, "QKV_SPLITS": 1, "SPLITS": 16,
        "SHARE": 16, "BLOCK": 64, "HAS_BIAS": False, "QK_NORM": False, "WINDOWED": False, "LISTED": False,
        "CELL": 8 * 128, "SCALED": False, "SCALES_AT": 0, "SCALE_STRIDE": 0, "FIRST": True, "LIST_WAITS": False,
        "NATIVE": True, "PDL": True,
    }  # fmt: skip
    signature, values, aligned = {}, {}, {}
    for place, param in enumerate(attention_kernel.params):
        if param.name in constants:
            signature[param.name] = "constexpr"
            values[place,] = constants[param.name]
        elif param.name in FLOATS or param.name in INTEGERS:
            signature[param.name] = "fp32" if param.name in FLOATS else "i32"
        else:
            signature[param.name] = (
                "*i32" if param.name in INDICES else "*fp32" if param.name in SINGLE else f"*{cells}"
            )
            aligned[place,] = [["tt.divisibility", 16]]
    options = {"num_warps": 8, "num_stages": 1, "launch_pdl": True}
    source = ASTSource(attention_kernel, signature, values, aligned)
    return str(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.mark.parametrize("cells", ["bf16", "fp16", "fp32"])
def test_the_first_block_is_asked_for_before_the_wait_and_used_behind_it(cells: str) -> None:
    before, _, behind = compiled(cells).partition("griddepcontrol.wait")
    assert "ld.global" in before, "the keys and values are loaded"
    assert "st.shared" not in before.rpartition("ld.global")[2], "and nothing there waits for them"
    assert behind.count("mov.b32 %r") >= 64 * 128 // (8 * 32) * (2 if cells == "fp32" else 1), "they are passed on"

"""Compiles, for a GPU that need not be here, every kernel that decode steps of a model's shape launch.

    python -m benchmarks.compiled_kernels llama-8b --quantization int4
    python -m benchmarks.compiled_kernels qwen3-0.6b --adapters

The steps are the engine's own, over tensors without memory; in place of a launch the kernel is compiled with the
launch's arguments, once for each kind of them. Says of each kernel how many kinds there are and the most shared memory,
and fails where one does not compile, or wants more shared memory or a larger grid than a GPU has. Wants Triton, which
brings its own compiler.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, get_args

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.against_vllm import SHAPES
from worker.config import Quantization
from worker.cuda.decode import CudaDecode, Step, Steps
from worker.cuda.decode_plan import plan_decode
from worker.cuda.fp8 import E4M3, Fp8Matrix
from worker.cuda.graphs import Draw, LaunchedSteps
from worker.cuda.launch import GRID_LIMIT
from worker.cuda.lora import CudaLoraSlots
from worker.cuda.packed import PACKED, PackedMatrix
from worker.kv_pool import KvPool
from worker.models.config import ModelConfig, read_config
from worker.models.weights import DecoderWeights, LayerWeights

HOPPER: Final = GPUTarget("cuda", 90, 32)
SHARED_BYTES: Final = 227 * 1024
WIDTHS: Final = (1, 2, 4, 8, 16, 32, 48, 64, 128, 256)
_NOWHERE: Final = torch.device("meta")
_CONTEXT: Final = 4096
_TYPES: Final = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8", torch.int8: "*i8", torch.float8_e4m3fn: "*fp8e4nv",
}  # fmt: skip
_OPTIONS: Final = ("num_warps", "num_stages", "launch_pdl")


class Compiler:
    """Takes launches, and compiles what has not been compiled yet."""

    def __init__(self) -> None:
        self.shared: dict[str, list[int]] = defaultdict(list)  # bytes, of each kind of a kernel
        self.faults: list[str] = []
        self._seen: set[str] = set()

    def launch(self, kernel: Any, *args: Any, grid: Any, **named: Any) -> None:
        """In the place of `triton.runtime.jit.JITFunction.run`."""
        names = [param.name for param in kernel.params]
        values = dict(zip(names, args, strict=False)) | {name: v for name, v in named.items() if name in names}
        if "NATIVE" in values:  # though these tensors are on no device
            values["NATIVE"] = True
        options = {name: named[name] for name in _OPTIONS if name in named}
        sizes = tuple(grid(values) if callable(grid) else grid)
        if any(size > GRID_LIMIT for size in sizes[1:]):
            self.faults.append(f"{kernel.__name__}: a grid of {sizes}")
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for place, param in enumerate(kernel.params):
            kind, aligned = _kind_of(param, values[param.name])
            signature[param.name] = kind
            if kind == "constexpr":
                constants[param.name] = values[param.name]
            elif aligned:
                attributes[place,] = [["tt.divisibility", 16]]
        key = repr((kernel.__name__, signature, constants, attributes, options))
        if key in self._seen:
            return
        self._seen.add(key)
        source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
        try:
            used = triton.compile(source, target=HOPPER, options=options).metadata.shared
        except Exception as error:  # noqa: BLE001 - the compiler's own kinds; told, and the result is a failure
            self.faults.append(f"{kernel.__name__} {constants}: {error}")
            return
        self.shared[kernel.__name__].append(used)
        if used > SHARED_BYTES:
            self.faults.append(f"{kernel.__name__} {constants}: {used} bytes of shared memory")


def _kind_of(param: Any, value: Any) -> tuple[str, bool]:
    """How Triton takes an argument: its type, and whether it is known to be a multiple of 16."""
    if param.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, Tensor):
        return _TYPES[value.dtype], value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    if value == 1 and not param.do_not_specialize:
        return "constexpr", False
    return "i32", value % 16 == 0 and not param.do_not_specialize


def run_steps(config: ModelConfig, quantization: Quantization, *, adapters: bool) -> None:
    """Run each kind of decode step of each width once, kernel by kernel."""
    weights, rotary = _weights(config, quantization), torch.empty(_CONTEXT, config.head_dim // 2, device=_NOWHERE)
    pool = KvPool(config.num_layers, 100_000, config.num_kv_heads, config.head_dim, torch.bfloat16, _NOWHERE)
    slots = CudaLoraSlots(config, 8, 16, torch.bfloat16, _NOWHERE) if adapters else None

    def run_all(step: Step, widths: Sequence[int], draws: Sequence[Draw]) -> Steps:
        for width in widths:
            for draw in draws:
                step(width, draw)
        return LaunchedSteps(step, widths, draws)

    plan = partial(plan_decode, hopper=True)
    CudaDecode(config, weights, (rotary, rotary), pool, WIDTHS, capture=run_all, plan=plan, adapters=slots)


def _weights(config: ModelConfig, quantization: Quantization) -> DecoderWeights:
    def vector(size: int, *, wanted: bool = True) -> Tensor | None:
        return torch.empty(size, dtype=torch.bfloat16, device=_NOWHERE) if wanted else None

    def matrix(rows: int, columns: int) -> Tensor:
        return _matrix(rows, columns, quantization)

    hidden, inner, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    packed_rows = query + 2 * config.num_kv_heads * config.head_dim
    parts: Mapping[str, Any] = {
        "attention_norm": vector(hidden), "qkv": matrix(packed_rows, hidden),
        "qkv_bias": vector(packed_rows, wanted=config.qkv_bias),
        "query_norm": vector(config.head_dim, wanted=config.qk_norm),
        "key_norm": vector(config.head_dim, wanted=config.qk_norm),
        "output": matrix(hidden, query), "output_bias": vector(hidden, wanted=config.output_bias),
        "mlp_norm": vector(hidden), "gate_up": matrix(2 * inner, hidden),
        "gate_up_bias": vector(2 * inner, wanted=config.mlp_bias), "down": matrix(hidden, inner),
        "down_bias": vector(hidden, wanted=config.mlp_bias),
    }  # fmt: skip
    ends = torch.empty(config.vocab_size, hidden, dtype=torch.bfloat16, device=_NOWHERE)
    norm = torch.empty(hidden, dtype=torch.bfloat16, device=_NOWHERE)
    head = _matrix(config.vocab_size, hidden, "int8") if quantization in PACKED else ends
    return DecoderWeights(ends, (LayerWeights(**parts),) * config.num_layers, norm, head)


def _matrix(rows: int, columns: int, quantization: Quantization) -> Tensor:
    """As a layer of a model on a GPU has it."""

    def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*sizes, dtype=dtype, device=_NOWHERE)

    match quantization:
        case "none":
            return empty(rows, columns, dtype=torch.bfloat16)
        case "int8":
            return PackedMatrix(8, empty(rows, columns // 4, dtype=torch.int32), empty(rows), torch.bfloat16)
        case "int4":
            codes, scales = (empty(rows, columns // each, dtype=torch.int32) for each in (8, 32))
            return PackedMatrix(4, codes, scales, torch.bfloat16)
        case "fp8":
            return Fp8Matrix(empty(rows, columns, dtype=E4M3), empty(rows), torch.bfloat16)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument(
        "--quantization", choices=get_args(Quantization), default="none", help="of the layers' matrices"
    )
    parser.add_argument("--adapters", action="store_true", help="steps with LoRA adapters, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape] | {"num_hidden_layers": 2}))
        config = read_config(Path(folder))
    compiler = Compiler()
    JITFunction.run = lambda kernel, *given, **named: compiler.launch(kernel, *given, **named)
    run_steps(config, args.quantization, adapters=args.adapters)
    for name, used in sorted(compiler.shared.items()):
        print(f"{name:32} {len(used):3} kinds, at most {max(used):7} bytes of shared memory")
    print(*compiler.faults, sep="\n")
    return 1 if compiler.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())

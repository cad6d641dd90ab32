# mypy: allow-untyped-calls, disable-error-code="attr-defined, import-untyped"
"""What numba.cuda kernels here need beyond numba: views of raw memory, 16-byte words, torch's stream.

Each differs between a GPU and numba's simulator (NUMBA_ENABLE_CUDASIM=1, set before numba is imported), where kernels
are plain Python on host memory; no other module needs to know which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import cuda, types
from numba.core import config
from torch import Tensor

SIMULATED = bool(config.ENABLE_CUDASIM)

# A few cells are a small grid on purpose; numba would warn at every such launch, and has no other switch.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0

_PAIR = ir.VectorType(ir.IntType(64), 2)
_INT32 = ir.IntType(32)


def memory_view(address: int, length: int, dtype: np.dtype[Any]) -> Any:
    """A flat array of `length` elements over raw memory, for kernels. It does not keep the memory."""
    interface: dict[str, object] = {
        "data": (address, False),
        "shape": (length,),
        "typestr": dtype.str,
        "strides": None,
        "version": 3,
    }
    if not SIMULATED:
        return cuda.as_cuda_array(_DeviceMemory(interface), sync=False)
    # The simulator would copy a plain array at every launch, and back.
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return FakeCUDAArray(np.asarray(_HostMemory(interface)))


def tensor_view(tensor: Tensor) -> Any:
    """A flat view of a contiguous tensor's elements."""
    return memory_view(tensor.data_ptr(), tensor.numel(), np.dtype(str(tensor.dtype).removeprefix("torch.")))


def current_stream() -> Any:
    """torch's current stream as numba's launches take it."""
    return 0 if SIMULATED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)


@dataclass(frozen=True)
class _DeviceMemory:
    __cuda_array_interface__: dict[str, object]


@dataclass(frozen=True)
class _HostMemory:
    __array_interface__: dict[str, object]


def _load_pair(array: Any, index: int) -> tuple[Any, Any]:
    return array[index], array[index + 1]


def _store_pair(array: Any, index: int, pair: tuple[Any, Any]) -> None:
    array[index], array[index + 1] = pair


def _pair_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), _PAIR.as_pointer(data.type.addrspace))


def _load_wide(typing_context: Any, array: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = builder.load(_pair_pointer(context, builder, signature.args[0], *args), align=16)
        words = [builder.extract_element(pair, _INT32(i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(array, types.int64), generate


def _store_wide(typing_context: Any, array: Any, index: Any, words: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pair = ir.Constant(_PAIR, ir.Undefined)
        for i in range(2):
            pair = builder.insert_element(pair, builder.extract_value(args[2], i), _INT32(i))
        builder.store(pair, _pair_pointer(context, builder, signature.args[0], *args[:2]), align=16)
        return context.get_dummy_value()

    return types.void(array, types.int64, words), generate


def _wide_functions() -> tuple[Any, Any]:
    if SIMULATED:
        return cuda.jit(device=True)(_load_pair), cuda.jit(device=True)(_store_pair)
    from numba.cuda.extending import intrinsic

    return intrinsic(_load_wide), intrinsic(_store_wide)


# load_wide(array uint64, index) -> two words; store_wide(array uint64, index, two words): one 16-byte access each, for
# an even index into a 16-byte aligned array. numba.cuda by itself knows no word wider than eight bytes.
load_wide, store_wide = _wide_functions()

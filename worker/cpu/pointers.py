"""Addresses as what lies there, and calls of code that was compiled for itself, for what numba compiles.

Code that is specialised for a few numbers is compiled as a function of C of its own and called by its address: then one
compiled loop serves all of them, and numba finds each on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types as numba_types
from numba.extending import intrinsic

types: Any = numba_types  # without types
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
_INDEX = ir.IntType(64)


@dataclass(frozen=True, slots=True)
class CompiledCode:
    """A function of C, which lives as long as `code`."""

    address: int
    code: Any


def compiled_code(function: Callable[..., None], num_arguments: int) -> CompiledCode:
    """Compile a function of so many integers, or load it from numba's cache on disk."""
    code: Any = numba.cfunc(types.void(*[types.intp] * num_arguments), cache=True)(function)
    return CompiledCode(code.address, code)


def pointer_to(kind: Any) -> Any:
    """An intrinsic that makes of an address a pointer to `kind`, for `numba.carray`."""
    pointer = types.CPointer(kind)

    def cast(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.intp), generate

    return intrinsic(cast)


_floats_at, _integers_at = pointer_to(types.float32), pointer_to(types.int64)


@numba.njit(nogil=True)
def floats(address: int, shape: Any) -> Floats:
    """The float32 array of that shape at an address; whoever gave it keeps the array alive."""
    array: Floats = numba.carray(_floats_at(address), shape)  # type: ignore[attr-defined]
    return array


@numba.njit(nogil=True)
def integers(address: int, shape: Any) -> Integers:
    """As `floats`, of int64."""
    array: Integers = numba.carray(_integers_at(address), shape)  # type: ignore[attr-defined]
    return array


def _call(typing_context: Any, code: Any, arguments: Any) -> Any:
    """An intrinsic that calls the function of C at address `code`, which takes integers alone, with a tuple of them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address, given = values
        numbers = [builder.extract_value(given, at) for at in range(len(signature.args[1]))]
        kind = ir.FunctionType(ir.VoidType(), [_INDEX] * len(numbers))
        builder.call(builder.inttoptr(address, kind.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.intp, types.UniTuple(types.intp, len(arguments))), generate


call: Any = intrinsic(_call)

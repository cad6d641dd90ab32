"""Vectors of LANES floats as LLVM has them, for code in which numba's own vectoriser would not find any.

Each function here writes instructions with a `builder` of llvmlite, inside an intrinsic, and gives their value.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils as numba_cgutils

from worker.models.blocks import LANES

cgutils: Any = numba_cgutils  # without types

FLOAT, INT, BYTE, INDEX = ir.FloatType(), ir.IntType(32), ir.IntType(8), ir.IntType(64)
FLOATS, INTS, BYTES = (ir.VectorType(element, LANES) for element in (FLOAT, INT, BYTE))
ZEROS = ir.Constant(FLOATS, [0.0] * LANES)
_READ, _KEEP, _DATA = 0, 3, 1


def number(value: int) -> Any:
    """A constant of the size of an address."""
    return ir.Constant(INDEX, value)


def spread(builder: Any, scalar: Any) -> Any:
    """`scalar` in all lanes."""
    none = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(none, scalar, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, none, ir.Constant(INTS, [0] * LANES))


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def prefetch(builder: Any, place: Any) -> None:
    """Have the line of bytes at `place` fetched, which need not be a place that may be read."""
    kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), INT, INT, INT])
    code = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(code, [place, *(ir.Constant(INT, option) for option in (_READ, _KEEP, _DATA))])


def zeroed(builder: Any, count: int) -> list[Any]:
    """Places of so many vectors of zeros, which LLVM keeps in registers where they fit."""
    places = [cgutils.alloca_once(builder, FLOATS) for _ in range(count)]
    for place in places:
        builder.store(ZEROS, place)
    return places

"""Evaluates the few instructions that `worker.cuda.packed_codes` writes out, over arrays of 32-bit words.

Triton's interpreter computes the same by plain operations, so without a GPU nothing else would run them. The text is
read from the module's source, which is not imported: it needs Triton.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
_SOURCE = Path(__file__).parents[1] / "worker" / "cuda" / "packed_codes.py"
_BFLOAT16_BITS = 7  # of the mantissa


def written_out(function: str) -> str:
    """The instructions within that function."""
    for node in ast.parse(_SOURCE.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            for each in ast.walk(node):
                if isinstance(each, ast.Constant) and isinstance(each.value, str) and ".reg" in each.value:
                    return each.value
    raise LookupError(function)


def evaluated(text: str, given: Mapping[str, Words]) -> dict[str, Words]:
    """All registers in the end, those of 16 bits in words of 32."""
    registers = dict(given)
    for line in text.strip()[1:-1].split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, operands = line.split(None, 1)
        target, *sources = (each.strip() for each in re.findall(r"\{[^}]*\}|[^,{}]+", operands) if each.strip())
        values = [_value(source, registers) for source in sources]
        if target.startswith("{"):
            low, high = target[1:-1].split(",")
            registers[low.strip()], registers[high.strip()] = values[0] & 0xFFFF, values[0] >> 16
        else:
            registers[target] = _OPERATIONS[name](*values).astype(np.uint32)
    return registers


def _value(source: str, registers: Mapping[str, Words]) -> Words:
    if source.startswith("{"):
        low, high = (registers[each.strip()] for each in source[1:-1].split(","))
        joined: Words = low | (high << 16)
        return joined
    return registers[source] if source in registers else np.array([int(source, 0)], dtype=np.uint32)


def _bytes(words: Words, *, signed: bool) -> list[Integers]:
    unsigned = [((words >> (8 * place)) & 255).astype(np.int64) for place in range(4)]
    return [(each ^ 128) - 128 for each in unsigned] if signed else unsigned


def _dot(*, first_signed: bool, second_signed: bool) -> Callable[[Words, Words, Words], Integers]:
    def dot(a: Words, b: Words, c: Words) -> Integers:
        pairs = zip(_bytes(a, signed=first_signed), _bytes(b, signed=second_signed), strict=True)
        return (sum((x * y for x, y in pairs), c.astype(np.int64))) & 0xFFFFFFFF

    return dot


def _permuted(a: Words, b: Words, selector: Words) -> Words:
    source, picked = _bytes(a, signed=False) + _bytes(b, signed=False), int(selector[0])
    return sum((source[picked >> (4 * place) & 7] << (8 * place) for place in range(4)), a.astype(np.int64) * 0)


def _halves(operation: Callable[..., npt.NDArray[np.float64]]) -> Callable[..., Words]:
    """Of two bfloat16 in each word, computed exactly and rounded once, ties to even."""

    def run(*words: Words) -> Words:
        low = _rounded(operation(*(_float((each & 0xFFFF) << 16) for each in words)))
        high = _rounded(operation(*(_float(each & 0xFFFF0000) for each in words)))
        joined: Words = low | (high << 16)
        return joined

    return run


def _float(bits: Words) -> npt.NDArray[np.float64]:
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def _rounded(exact: npt.NDArray[np.float64]) -> Words:
    bits, dropped = np.ascontiguousarray(exact).view(np.uint64), np.uint64(52 - _BFLOAT16_BITS)
    half = (np.uint64(1) << (dropped - np.uint64(1))) - np.uint64(1)
    rounded = ((bits + half + ((bits >> dropped) & np.uint64(1))) >> dropped) << dropped
    return rounded.view(np.float64).astype(np.float32).view(np.uint32) >> 16


_OPERATIONS: Mapping[str, Callable[..., npt.NDArray[np.integer]]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, places: a << places,
    "shr.u32": lambda a, places: a >> places,
    "lop3.b32": lambda a, b, c, table: (a & b) | c if int(table[0]) == 0xEA else _refused(table),
    "prmt.b32": _permuted,
    "dp4a.u32.u32": _dot(first_signed=False, second_signed=False),
    "dp4a.u32.s32": _dot(first_signed=False, second_signed=True),
    "dp4a.s32.u32": _dot(first_signed=True, second_signed=False),
    "dp4a.s32.s32": _dot(first_signed=True, second_signed=True),
    "mad.lo.s32": lambda a, b, c: (a.astype(np.int64) * b.astype(np.int64) + c) & 0xFFFFFFFF,
    "fma.rn.bf16x2": _halves(lambda a, b, c: a * b + c),
}


def _refused(table: Words) -> Words:
    raise NotImplementedError(f"lop3 of the table {int(table[0]):#x}")

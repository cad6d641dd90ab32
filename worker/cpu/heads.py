"""Attention of the query heads that share a key/value head, for one row on the CPU in float32, compiled.

Sums over a head's dimensions stay in vectors that LLVM is given as such: with head dimensions that it learns only when
the code runs, the same loops in numba took more than ten times as long.
"""

from __future__ import annotations

import functools
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from worker.cpu.decode import to_shares
from worker.cpu.pointers import CompiledCode, compiled_code, floats
from worker.cpu.vectors import BYTE, FLOAT, FLOATS, INDEX, cgutils, multiply_add, number, prefetch, spread, zeroed
from worker.models.blocks import LANES

# Cells may lie anywhere, which no processor foresees: how many cells before its turn one is fetched.
_AHEAD = 8


class _Writer:
    """Writes the code of one loop over cells. `arguments`: see `_cell_loop`."""

    def __init__(self, builder: Any, arguments: Any, head_dim: int, shared: int) -> None:
        self.builder = builder
        self.num_vectors = head_dim // LANES
        self.shared = shared
        self.rows, self.weights = (builder.inttoptr(arguments[at], FLOAT.as_pointer()) for at in (0, 4))
        self._pool = builder.inttoptr(arguments[1], FLOAT.as_pointer())
        self._cells = builder.inttoptr(arguments[2], INDEX.as_pointer())
        self.num_seen = arguments[3]
        self._cell_size = arguments[5]

    def vector(self, base: Any, index: int) -> Any:
        """Vector `index` behind `base`."""
        place = self.builder.gep(base, [number(index * LANES)])
        return self.builder.bitcast(place, FLOATS.as_pointer())

    def of_cell(self, index: Any) -> list[Any]:
        """What the pool has in the cell that is seen as number `index`; a later one's is fetched meanwhile."""
        later = self.builder.add(index, number(_AHEAD))
        last = self.builder.sub(self.num_seen, number(1))
        is_there = self.builder.icmp_signed("<", later, last)
        ahead = self._cell(self.builder.select(is_there, later, last))
        for at in range(self.num_vectors):
            prefetch(self.builder, self._bytes(ahead, at))
        base = self._cell(index)
        return [self.builder.load(self.vector(base, at), align=4) for at in range(self.num_vectors)]

    def _cell(self, index: Any) -> Any:
        cell = self.builder.load(self.builder.gep(self._cells, [index]))
        return self.builder.gep(self._pool, [self.builder.mul(cell, self._cell_size)])

    def _bytes(self, base: Any, index: int) -> Any:
        return self.builder.bitcast(self.vector(base, index), BYTE.as_pointer())

    def weight(self, head: int, index: Any) -> Any:
        """The place of the weight of what is seen as number `index`."""
        first = self.builder.mul(self.num_seen, number(head))
        return self.builder.gep(self.weights, [self.builder.add(first, index)])


def _write_scores(writer: _Writer) -> None:
    builder = writer.builder
    total = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(FLOAT, [FLOAT, FLOATS]), f"llvm.vector.reduce.fadd.v{LANES}f32"
    )
    queries = [
        builder.load(writer.vector(writer.rows, at), align=4) for at in range(writer.shared * writer.num_vectors)
    ]
    with cgutils.for_range(builder, writer.num_seen, intp=INDEX) as seen:
        key = writer.of_cell(seen.index)
        for head in range(writer.shared):
            query = queries[head * writer.num_vectors : (head + 1) * writer.num_vectors]
            products = builder.fmul(query[0], key[0])
            for of_query, of_key in zip(query[1:], key[1:], strict=True):
                products = multiply_add(builder, of_query, of_key, products)
            score = builder.call(total, [ir.Constant(FLOAT, -0.0), products], fastmath=("reassoc",))
            builder.store(score, writer.weight(head, seen.index))


def _write_mix(writer: _Writer) -> None:
    builder = writer.builder
    sums = zeroed(builder, writer.shared * writer.num_vectors)
    with cgutils.for_range(builder, writer.num_seen, intp=INDEX) as seen:
        value = writer.of_cell(seen.index)
        for head in range(writer.shared):
            weight = spread(builder, builder.load(writer.weight(head, seen.index)))
            for at, of_value in enumerate(value):
                place = sums[head * writer.num_vectors + at]
                builder.store(multiply_add(builder, weight, of_value, builder.load(place)), place)
    for at, place in enumerate(sums):
        builder.store(builder.load(place), writer.vector(writer.rows, at), align=4)


def _cell_loop(write: Any) -> Any:
    """An intrinsic that takes addresses and sizes: `rows` float32[G, D], which are read or written; the pool's keys or
    values of the head, its cells `cell_size` floats apart; `cells` int64[num_seen]; `weights` float32[G, num_seen]; and
    as constants of that code D and G."""

    def typed(
        typing_context: Any,
        rows: Any,
        pool: Any,
        cells: Any,
        num_seen: Any,
        weights: Any,
        cell_size: Any,
        head_dim: Any,
        shared: Any,
    ) -> Any:
        if not isinstance(head_dim, types.IntegerLiteral) or not isinstance(shared, types.IntegerLiteral):
            return None  # numba asks again with the constants' values

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write(_Writer(builder, arguments, head_dim.literal_value, shared.literal_value))
            return context.get_dummy_value()

        return types.void(*[types.intp] * 6, head_dim, shared), generate

    return intrinsic(typed)


_score: Any = _cell_loop(_write_scores)
_mix: Any = _cell_loop(_write_mix)


@functools.cache
def compile_heads(head_dim: int, shared: int) -> CompiledCode:
    """Compile it for `shared` query heads, or load it from numba's cache on disk. `head_dim` is a multiple of LANES.

    It takes addresses and sizes: `queries` [G, D], scaled; keys and values of the head, cells `cell_size` floats apart;
    `cells` int64[num_seen]; room for `weights` [G, num_seen]; and `mixed` [G, D], which it writes.
    """

    def attend(
        queries: int, keys: int, values: int, cell_size: int, cells: int, num_seen: int, weights: int, mixed: int
    ) -> None:
        _score(queries, keys, cells, num_seen, weights, cell_size, head_dim, shared)
        to_shares(floats(weights, (shared, num_seen)))
        _mix(mixed, values, cells, num_seen, weights, cell_size, head_dim, shared)

    return compiled_code(attend, 8)

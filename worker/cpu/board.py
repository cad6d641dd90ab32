"""Threads that take the tasks of one phase after another from a board, compiled.

A phase is over when its tasks are done, and not when every thread has come: a thread that has lost its core keeps the
others waiting for the one task that it holds at most, and no number of threads is too few. Tasks are counted with
atomic additions; a thread that waits spins, and after a while gives its core away.
"""

from __future__ import annotations

import platform
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils as numba_cgutils
from numba.extending import intrinsic

Board = npt.NDArray[np.int64]
cgutils: Any = numba_cgutils  # without types

_INDEX = ir.IntType(64)
_NOTHING_TO_NOTHING = ir.FunctionType(ir.VoidType(), [])
# Counters of tasks that were taken and that were done have cache lines of their own.
_TAKEN, _DONE, _ENTRIES = 0, 8, 16
_PAUSE = "llvm.x86.sse2.pause" if platform.machine() in ("x86_64", "AMD64") else None
# Some tens of microseconds, which is longer than a task takes.
_MOST_SPINS = 2_000


def new_board(num_phases: int) -> Board:
    """int64[num_phases, 16], nothing taken and nothing done."""
    return np.zeros((num_phases, _ENTRIES), dtype=np.int64)


def _place(context: Any, builder: Any, kinds: Any, arguments: Any) -> Any:
    """Where entry `arguments[1]` of the array `arguments[0]` lies."""
    array = context.make_array(kinds[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


def _write_add_one(typing_context: Any, counters: Any, entry: Any) -> Any:
    """The counter as it was before one was added. counters: int64[n]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature.args, arguments)
        return builder.atomic_rmw("add", place, ir.Constant(_INDEX, 1), "acq_rel")

    return types.int64(counters, types.int64), generate


def _write_read(typing_context: Any, counters: Any, entry: Any) -> Any:
    """The counter; what other threads wrote before they raised it can be read afterwards."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, signature.args, arguments)
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(counters, types.int64), generate


def _write_pause(typing_context: Any) -> Any:
    """Tell the processor that this thread spins."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if _PAUSE is not None:
            builder.call(cgutils.get_or_insert_function(builder.module, _NOTHING_TO_NOTHING, _PAUSE), [])
        return context.get_dummy_value()

    return types.void(), generate


_add_one: Any = intrinsic(_write_add_one)
_read: Any = intrinsic(_write_read)
_pause: Any = intrinsic(_write_pause)
_give_core_away = types.ExternalFunction("sched_yield", types.int32())


@numba.njit(nogil=True)
def take(board: Board, phase: int) -> int:
    """The next task of a phase, from 0 on; as many as there are, or more, where none is left."""
    taken: int = _add_one(board[phase], _TAKEN)
    return taken


@numba.njit(nogil=True)
def finish(board: Board, phase: int) -> None:
    """A task that was taken is done."""
    _add_one(board[phase], _DONE)


@numba.njit(nogil=True)
def wait(board: Board, phase: int, num_tasks: int) -> None:
    """Until all tasks of a phase are done."""
    num_spins = 0
    while _read(board[phase], _DONE) < num_tasks:
        num_spins += 1
        if num_spins < _MOST_SPINS:
            _pause()
        else:
            _give_core_away()

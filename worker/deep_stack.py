"""Runs what recurses as deep as its input nests, in code that does not look for the end of its stack.

A thread's stack takes no memory before it is used, and goes with the thread. Not for what runs at every step: a thread
is made for each call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

STACK_BYTES: Final = 256 << 20
"""Twice what llguidance takes for the deepest grammar of 256 Ki characters that was found: rules or schemas that are a
chain of references."""
_starting = threading.Lock()

T = TypeVar("T")


def on_deep_stack(work: Callable[[], T]) -> T:
    """What `work` returns or raises, on a thread with a stack of `STACK_BYTES`; blocks until then."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - all of it is the caller's
            done.set_exception(error)

    thread = threading.Thread(target=run, name="deep-stack", daemon=True)
    with _starting:  # the size is the process's: what another thread starts meanwhile has it, too, and leaves it unused
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return done.result()

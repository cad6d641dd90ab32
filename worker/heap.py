"""Keeps Python's collector of garbage off what lives as long as its process: modules, vocabularies, compiled kernels.

A full collection looks at every object that there is, 370,000 in a worker once it is ready, and no thread of the
process goes on meanwhile. Steps of many rows cause one every 150, since what they make outlives two younger
collections. What is *settled* is passed over from then on, though it still goes when nothing refers to it any more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def settle() -> None:
    """What is alive now stays as long as the process; for one that is ready to serve."""
    gc.collect()
    gc.freeze()


@contextmanager
def settled() -> Iterator[None]:
    """The same for the length of a block, in a process that does other things afterwards."""
    settle()
    try:
        yield
    finally:
        gc.unfreeze()

"""Captured CUDA graphs of decode steps: one a width and kind of draw, all in one memory pool, the largest first.

A graph holds kernels and addresses only; which sequences it runs is `DecodeState`'s content. So nothing is recaptured
when sequences come, go or move; new weights, a new pool or new state mean new graphs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

Forward = Callable[[], Tensor]
Capture = Callable[[Forward], Forward]
"""Makes a forward ready to run again and again; what a run returns lasts until the next one."""


class Draw(Enum):
    """How a captured step ends: all rows by arg max, or by the sampler (whose logits stay readable). The adapted ones
    add rows' adapters to their products."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    ADAPTED_GREEDY = "adapted, greedy"
    ADAPTED_SAMPLED = "adapted, sampled"

    @property
    def is_sampled(self) -> bool:
        return self in (Draw.SAMPLED, Draw.ADAPTED_SAMPLED)

    @property
    def is_adapted(self) -> bool:
        return self in (Draw.ADAPTED_GREEDY, Draw.ADAPTED_SAMPLED)

    @property
    def adapted(self) -> Draw:
        """The same, with adapters."""
        return Draw.ADAPTED_SAMPLED if self.is_sampled else Draw.ADAPTED_GREEDY


class DecodeGraphs:
    """Graphs of `step(width, draw)`, which launches a step on the current stream. Owner: the executor, on the engine
    thread; capture while nothing else runs on the device."""

    def __init__(
        self,
        step: Callable[[int, Draw], None],
        widths: Sequence[int],
        draws: Sequence[Draw],
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """`stream` is what is captured on; see `capture_stream`."""
        assert widths
        self._widths = tuple(sorted(widths))
        self._step = step  # which owns what the graphs have the addresses of
        self._graphs: dict[tuple[int, Draw], torch.cuda.CUDAGraph] = {}
        memory = torch.cuda.graph_pool_handle()
        stream = stream or capture_stream()
        for width in reversed(self._widths):
            for draw in draws:
                self._graphs[width, draw], _ = captured(partial(step, width, draw), memory, stream)

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    def width_for(self, num_rows: int) -> int:
        """The narrowest captured width that holds so many rows; the rest is padding."""
        return next(width for width in self._widths if width >= num_rows)

    def replay(self, width: int, draw: Draw) -> None:
        """Runs the step on the current stream; returns at once."""
        self._graphs[width, draw].replay()


class LaunchedSteps:
    """The same steps without graphs: each is launched kernel by kernel when it is run."""

    def __init__(self, step: Callable[[int, Draw], None], widths: Sequence[int], draws: Sequence[Draw]) -> None:
        assert widths
        self._widths = tuple(sorted(widths))
        self._step = step

    def width_for(self, num_rows: int) -> int:
        """The narrowest width that holds so many rows; the rest is padding."""
        return next(width for width in self._widths if width >= num_rows)

    def replay(self, width: int, draw: Draw) -> None:
        """Launches the step on the current stream."""
        self._step(width, draw)


def capture_stream() -> torch.cuda.Stream:
    """A stream for everything that an executor captures, and captures again. The vendor's library has work space of its
    own for each stream, tens of megabytes that graphs have the address of and that are never given back: with one
    stream a trial has it already when memory is measured, and growth takes no more."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def captured(run: Callable[[], Result], memory: Any, stream: torch.cuda.Stream) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of what `run` launches on the current stream, captured on `stream` in the graphs' memory pool `memory`,
    and what it returned: tensors that each replay writes again."""
    # The eager run compiles kernels and makes library handles, neither of which may happen inside a capture.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # A pool that grows captures again while other threads pin adapters' memory: what they do is no part of the graph.
    with (
        _nothing_collected(),
        torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"),
    ):
        result = run()
    graph.replay()  # the first one brings the graph to the device, which takes longer than the step does
    return graph, result


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Garbage may hold graphs of an executor that is gone, and what destroys one ends the capture around it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def captures(stream: torch.cuda.Stream | None = None) -> Capture:
    """Captures forwards, on `stream`, as graphs that share one memory pool: capture the largest first."""
    memory = torch.cuda.graph_pool_handle()
    chosen = stream or capture_stream()

    def capture(forward: Forward) -> Forward:
        graph, result = captured(forward, memory, chosen)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    return capture

"""Captured CUDA graphs of decode steps: one a width and kind of draw, all in one memory pool, the largest first.

A graph holds kernels and addresses only; which sequences it runs is `DecodeState`'s content. So nothing is recaptured
when sequences come, go or move; new weights, a new pool or new state mean new graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch


class Draw(Enum):
    """How a captured step ends: all rows by arg max, or by the sampler (whose logits stay readable)."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


class DecodeGraphs:
    """Graphs of `step(width, draw)`, which launches a step on the current stream. Owner: the executor, on the engine
    thread; capture while nothing else runs on the device."""

    def __init__(self, step: Callable[[int, Draw], None], widths: Sequence[int], draws: Sequence[Draw]) -> None:
        assert widths
        self._widths = tuple(sorted(widths))
        self._graphs: dict[tuple[int, Draw], torch.cuda.CUDAGraph] = {}
        memory = torch.cuda.graph_pool_handle()
        for width in reversed(self._widths):
            for draw in draws:
                self._graphs[width, draw] = _capture(step, width, draw, memory)

    @property
    def widths(self) -> tuple[int, ...]:
        return self._widths

    def width_for(self, num_rows: int) -> int:
        """The narrowest captured width that holds so many rows; the rest is padding."""
        return next(width for width in self._widths if width >= num_rows)

    def replay(self, width: int, draw: Draw) -> None:
        """Runs the step on the current stream; returns at once."""
        self._graphs[width, draw].replay()


def _capture(step: Callable[[int, Draw], None], width: int, draw: Draw, memory: Any) -> torch.cuda.CUDAGraph:
    # The eager run compiles kernels and makes library handles, neither of which may happen inside a capture.
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(width, draw)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=memory, stream=stream):
        step(width, draw)
    return graph
